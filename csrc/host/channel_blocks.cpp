// Python runs the handlers of signals, which may raise, between any two of its instructions. What
// must happen together happens here, within one instruction: an object of this file owns what it
// has taken before Python runs again, and gives it back when its last reference goes.
#include "host/channel_blocks.h"

#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/publisher.h"
#include "host/reader.h"

namespace py = pybind11;

namespace fusedrl {

namespace {

using namespace channel;

// Runs what Python has to do although interrupts may end it: it is begun again, and the error that
// came first is returned. Throws it where no attempt succeeds.
template <class Work>
std::exception_ptr despite_interrupts(const Work& work) {
  constexpr int tries = 8;
  std::exception_ptr first;
  for (int i = 0; i < tries; ++i) {
    try {
      work();
      return first;
    } catch (py::error_already_set&) {
      if (!first) first = std::current_exception();
    }
  }
  std::rethrow_exception(first);
}

// Runs in a destructor, where an error can only be told, and must leave the one that is on its way.
template <class Work>
void in_destructor(const char* where, const Work& work) {
  const py::error_scope on_its_way;
  try {
    work();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable(where);
  } catch (const std::exception&) {
    // The end is closed, or its parent's, and so is what was taken.
  }
}

// A lease for Python. Where the reader computes asynchronously, `after_use` is told the slot before
// its release, and holds the slot until the work that the current stream has by then is done.
class PythonLease {
 public:
  PythonLease(py::object reader, std::shared_ptr<Reader> end, bool apply)
      : reader(std::move(reader)), lease_(std::move(end), apply) {}
  PythonLease(const PythonLease& other)
      : reader(other.reader), after_use(other.after_use), lease_(other.lease_) {}
  ~PythonLease() {
    if (!lease_.held()) return;
    in_destructor("the release of a lease", [&] {
      if (!lent) return release();
      const std::string warning =
          "a lease of version " + std::to_string(version()) +
          " was dropped without release(): its slot stays taken; use it as a "
          "context manager";
      if (PyErr_WarnEx(PyExc_ResourceWarning, warning.c_str(), 1) != 0)
        throw py::error_already_set();
    });
    if (lease_.held()) lease_.forget();  // what may be in use stays locked
  }

  // Orders the next write to the slot after the work that the current stream has so far.
  std::exception_ptr used() const {
    if (after_use.is_none() || !lease_.held()) return nullptr;
    return despite_interrupts([&] { after_use(lease_.slot()); });
  }
  void release() {
    const std::exception_ptr interrupt = used();
    lease_.release();
    if (interrupt) std::rethrow_exception(interrupt);
  }
  bool held() const { return lease_.held(); }
  int slot() const { return lease_.slot(); }
  int64_t version() const { return lease_.version(); }

  py::object reader;
  py::object after_use = py::none();
  bool lent = false;

 private:
  Lease lease_;
};

// A lock of Python's, held from the moment in which this exists until release(), at the latest
// until it goes. A negative timeout, in seconds, waits for ever.
class Acquired {
 public:
  Acquired(py::object lock, double timeout)
      : lock_(std::move(lock)), held_(lock_.attr("acquire")(true, timeout).cast<bool>()) {}
  ~Acquired() {
    in_destructor("the release of a lock", [&] { release(); });
  }
  Acquired(const Acquired&) = delete;
  Acquired& operator=(const Acquired&) = delete;

  bool held() const { return held_; }
  void release() {
    if (std::exchange(held_, false)) lock_.attr("release")();
  }

 private:
  py::object lock_;
  bool held_;
};

// The calls that compute with one version, which may overlap: the first of them chooses it, and
// what holds it goes with the last. A subclass has the lock, and chooses the version in its
// _begin().
class Calls {
 public:
  // A call counts from the moment in which it has its version.
  static py::object enter(const py::object& self) {
    const Acquired locked(self.attr("_lock"), -1);
    Calls& calls = self.cast<Calls&>();
    py::object version;
    try {
      version = self.attr("_begin")();
    } catch (py::error_already_set&) {
      calls.release_last();
      throw;
    }
    ++calls.running;
    return version;
  }
  // Without the lock: another thread begins a version only where no call runs.
  void exit() {
    if (running > 0) --running;
    if (!release_last() && !held.is_none()) {
      const auto interrupt = held.cast<PythonLease&>().used();
      if (interrupt) std::rethrow_exception(interrupt);
    }
  }

  int running = 0;
  py::object held = py::none();

 private:
  bool release_last() {
    if (running > 0 || held.is_none()) return false;
    const py::object last = std::exchange(held, py::none());
    last.cast<PythonLease&>().release();
    return true;
  }
};

// A `with` block as an object: entered when it is made, and left once, at the latest with it.
class Entered {
 public:
  Entered(py::object manager, const py::object& then) : manager_(std::move(manager)) {
    value_ = manager_.attr("__enter__")();
    entered_ = true;
    try {
      if (!then.is_none()) value_ = then(value_);
    } catch (py::error_already_set&) {
      leave();
      throw;
    }
  }
  ~Entered() {
    in_destructor("the end of a call", [&] { leave(); });
  }
  void leave() {
    if (std::exchange(entered_, false))
      manager_.attr("__exit__")(py::none(), py::none(), py::none());
  }
  py::object value() const { return value_; }

 private:
  py::object manager_, value_;
  bool entered_ = false;
};

// As Entered, of several managers: all of them are entered, or none is.
class AllEntered {
 public:
  explicit AllEntered(const std::vector<py::object>& managers) {
    for (const py::object& manager : managers)
      entered_.push_back(std::make_unique<Entered>(manager, py::none()));
  }
  void leave() {
    std::exception_ptr first;
    for (; !entered_.empty(); entered_.pop_back()) {
      try {
        entered_.back()->leave();
      } catch (py::error_already_set&) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
  }

 private:
  std::vector<std::unique_ptr<Entered>> entered_;
};

// A slot that is being written, with the lock of its channel, from the moment in which this exists
// until the block ends. What is not published by then is given up.
class Writing {
 public:
  // `begin` is told whether the lock is held, and returns the slot and its version.
  Writing(py::object channel, double timeout, const py::object& begin)
      : channel(std::move(channel)),
        lock_(this->channel.attr("_lock"), timeout),
        end_(this->channel.attr("_end").cast<std::shared_ptr<Publisher>>()) {
    try {
      std::tie(slot, version) = begin(lock_.held()).cast<std::pair<int, int64_t>>();
    } catch (...) {
      give_up();
      throw;
    }
  }
  ~Writing() {
    in_destructor("the end of a writing block", [&] { end(false); });
  }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

  void end(bool publish) {
    if (!lock_.held()) return;
    try {
      // The copies of a block that raises may not be done, and others follow.
      const std::exception_ptr interrupt =
          despite_interrupts([&] { channel.attr("_memory").attr("after_write")(slot); });
      if (interrupt) std::rethrow_exception(interrupt);
      if (publish)
        end_->commit(slot, version);
      else
        end_->abort();
    } catch (...) {
      give_up();
      throw;
    }
    lock_.release();
  }

  py::object channel;
  int slot = -1;
  int64_t version = no_version;

 private:
  void give_up() {
    if (lock_.held() && end_->is_open()) end_->abort();
    lock_.release();
  }

  Acquired lock_;
  std::shared_ptr<Publisher> end_;
};

}  // namespace

void bind_leases(py::module_& m) {
  py::class_<Lease>(m, "Hold", "A slot that stays leased as long as this object exists.")
      .def(py::init<std::shared_ptr<Reader>, int>(), py::arg("end"), py::arg("slot"));

  py::class_<PythonLease>(m, "Lease", "One lease of a version, given back once.")
      .def(py::init<py::object, std::shared_ptr<Reader>, bool>(), py::arg("reader"), py::arg("end"),
           py::arg("apply"))
      .def(py::init<const PythonLease&>(), py::arg("other"))
      .def_readonly("reader", &PythonLease::reader)
      .def_readwrite("after_use", &PythonLease::after_use)
      .def_readwrite("lent", &PythonLease::lent)
      .def_property_readonly("held", &PythonLease::held)
      .def_property_readonly("slot", &PythonLease::slot)
      .def_property_readonly("version", &PythonLease::version)
      .def("release", &PythonLease::release)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](PythonLease& lease, const py::args&) { lease.release(); });

  py::class_<Acquired>(m, "Acquired", "A lock that is held as long as this object says.")
      .def(py::init<py::object, double>(), py::arg("lock"), py::arg("timeout"))
      .def_property_readonly("held", &Acquired::held)
      .def("release", &Acquired::release);

  py::class_<Calls>(m, "Calls", "Calls that compute with one version.")
      .def(py::init<>())
      .def_readonly("running", &Calls::running)
      .def_readwrite("held", &Calls::held)
      .def("__enter__", &Calls::enter)
      .def("__exit__", [](Calls& calls, const py::args&) { calls.exit(); });

  py::class_<Entered>(m, "Entered", "A `with` block as an object, which is left once.")
      .def(py::init<py::object, py::object>(), py::arg("manager"), py::arg("then") = py::none())
      .def("leave", &Entered::leave)
      .def("__enter__", &Entered::value)
      .def("__exit__", [](Entered& entered, const py::args&) { entered.leave(); });

  py::class_<AllEntered>(m, "AllEntered", "Several `with` blocks as one object.")
      .def(py::init<const std::vector<py::object>&>(), py::arg("managers"))
      .def("__enter__", [](const AllEntered&) {})
      .def("__exit__", [](AllEntered& entered, const py::args&) { entered.leave(); });

  py::class_<Writing>(m, "Writing", "A slot that is being written, given up unless it is left.")
      .def(py::init<py::object, double, py::object>(), py::arg("channel"), py::arg("timeout"),
           py::arg("begin"))
      .def_readonly("channel", &Writing::channel)
      .def_readonly("slot", &Writing::slot)
      .def_readonly("version", &Writing::version)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](Writing& writing, const py::object& kind, const py::object&,
                          const py::object&) { writing.end(kind.is_none()); });
}

}  // namespace fusedrl
