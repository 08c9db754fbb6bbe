// The two ends of a weight channel for Python.
#include "host/channel_module.h"

#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "host/copy.h"
#include "host/dlpack.h"
#include "host/publisher.h"
#include "host/reader.h"

namespace py = pybind11;

namespace fusedrl {

namespace {

using namespace channel;

// Runs without the GIL, but not by py::gil_scoped_release. When the interpreter ends, taking the
// GIL back ends a daemon thread by unwinding its stack, which terminates the process in a
// destructor.
template <class Work>
void without_gil(const Work& work) {
  std::exception_ptr error;
  PyThreadState* thread = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(thread);
  if (error) std::rethrow_exception(error);
}

// Between the stretches, Python's signal handlers run, and may raise.
std::unique_ptr<MemoryFile> reserved(uint64_t bytes) {
  std::unique_ptr<MemoryFile> file = MemoryFile::create("fusedrl-channel");
  for (bool all = false; !all;) {
    without_gil([&] { all = file->reserve(bytes); });
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  file->seal();
  return file;
}

std::shared_ptr<Publisher> make_publisher(uint64_t slots, uint64_t slot_bytes, uint64_t max_readers,
                                          const std::string& session, const std::string& manifest) {
  const Geometry geometry{slots, slot_bytes, max_readers, manifest.size()};
  return std::make_shared<Publisher>(reserved(geometry.file_bytes()), geometry, session, manifest);
}

// Errors of the kernel become OSError with their number, as only the caller knows the remedy.
void raise_os_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::system_error& refused) {
    py::object arguments = py::make_tuple(refused.code().value(), refused.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

// Calls `give_back` in a destructor, which must leave the error that is on its way, and can only
// tell its own; twice, as a handler of a signal may have ended the first attempt.
template <class GiveBack>
void in_destructor(const GiveBack& give_back) {
  const py::error_scope on_its_way;
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      return give_back();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a slot of a weight channel");
    } catch (const std::exception&) {
      return;  // the end is closed, and so is what was taken
    }
  }
}

// A lease for Python. Handlers of signals run between two instructions of Python, so that one of
// them finds the slot owned by this object, or not taken. In a forked child it owns nothing.
//
// `before_release`, if it is not None, is told the slot before it is given back: on a GPU, it marks
// the end of the work that uses the slot. Handlers of signals run there too, and may raise.
class PythonLease {
 public:
  PythonLease(std::shared_ptr<Reader> end, bool apply) : end_(end), lease_(std::move(end), apply) {}
  PythonLease(std::shared_ptr<Reader> end, int slot) : end_(end), lease_(std::move(end), slot) {}
  PythonLease(const PythonLease& other) = default;
  ~PythonLease() {
    in_destructor([&] { release(); });
    if (lease_.held()) lease_.forget();  // what may be in use stays locked until the reader closes
  }

  void release() {
    if (!end_->is_open()) return;
    if (lease_.held() && !before_release.is_none()) before_release(lease_.slot());
    lease_.release();
  }
  bool held() const { return lease_.held(); }
  int slot() const { return lease_.slot(); }
  int64_t version() const { return lease_.version(); }

  py::object before_release = py::none();

 private:
  std::shared_ptr<Reader> end_;
  Lease lease_;
};

// A slot that is being written, to be published as `version`: by commit(), or given up by abort(),
// at the latest when this is destroyed. In a forked child it owns nothing. `before_release` is as
// for a lease.
class PythonWrite {
 public:
  explicit PythonWrite(std::shared_ptr<Publisher> end)
      : end_(std::move(end)), slot_(end_->try_begin()) {}
  ~PythonWrite() {
    in_destructor([&] { abort(); });
  }
  PythonWrite(const PythonWrite&) = delete;
  PythonWrite& operator=(const PythonWrite&) = delete;

  // Throws std::runtime_error once the channel is closed, or in a forked child.
  void commit() {
    if (!slot_) return;
    if (!before_release.is_none()) before_release(*slot_);
    end_->commit(*slot_, version);
    slot_.reset();
  }
  void abort() {
    if (!slot_ || !end_->is_open()) return;
    if (!before_release.is_none()) before_release(*slot_);
    end_->abort();
    slot_.reset();
  }
  std::optional<int> slot() const { return slot_; }

  py::object before_release = py::none();
  int64_t version = no_version;

 private:
  std::shared_ptr<Publisher> end_;
  std::optional<int> slot_;
};

// The tensor owns the mapping, so it outlives the end of the channel that it came from. It also
// owns `lease`, which may be None.
template <class End>
py::capsule slot_tensor(const End& end, int slot, uint64_t bytes, py::object lease) {
  using Owner = std::pair<std::shared_ptr<Mapping>, std::shared_ptr<void>>;
  auto owner = std::make_shared<Owner>(end.slots(), dlpack::keep_alive(std::move(lease)));
  return dlpack::uint8_tensor(end.slot(slot), static_cast<int64_t>(bytes), {dlpack::kCpu, 0},
                              std::move(owner));
}

// (target, source, elements, bytes of an element, float32 to bfloat16) for each piece.
using PieceArguments = std::tuple<uintptr_t, uintptr_t, int64_t, int64_t, bool>;

void copy_pieces(const std::vector<PieceArguments>& arguments, int threads) {
  std::vector<Piece> pieces;
  pieces.reserve(arguments.size());
  for (const auto& [target, source, elements, bytes, cast] : arguments)
    pieces.push_back({reinterpret_cast<char*>(target), reinterpret_cast<const char*>(source),
                      elements, bytes, cast ? 2 : bytes,
                      cast ? Cast::float_to_bfloat16 : Cast::none});
  without_gil([&] { copy(pieces, threads); });
}

void signal_at(const std::string& step, int signal) {
  for (size_t i = 0; i < std::size(step_names); ++i) {
    if (step_names[i] != step) continue;
    signal_number = signal;
    signal_step = static_cast<int>(i);
    return;
  }
  throw std::invalid_argument("step: expected one of channel_steps(), got '" + step + "'");
}

}  // namespace

void bind_channel(py::module_& m) {
  py::register_local_exception_translator(&raise_os_error);

  py::class_<ReaderState>(m, "ReaderState", "One reader of a channel, as its publisher sees it.")
      .def_readonly("pid", &ReaderState::pid)
      .def_readonly("alive", &ReaderState::alive)
      .def_readonly("leased", &ReaderState::leased)
      .def_readonly("applied", &ReaderState::applied);

  py::class_<Publisher, std::shared_ptr<Publisher>>(m, "Publisher",
                                                    "The writing end of a weight channel.")
      .def(py::init(&make_publisher), py::arg("slots"), py::arg("slot_bytes"),
           py::arg("max_readers"), py::arg("session"), py::arg("manifest"))
      .def("version", &Publisher::version, "The published version, -1 before the first.")
      .def("writer", &Publisher::writer, "The thread that writes a slot, 0 if none does.")
      .def("fd", &Publisher::fd)
      .def("slot_tensor", &slot_tensor<Publisher>, py::arg("slot"), py::arg("bytes"),
           py::arg("lease"))
      .def("readers", &Publisher::readers, py::arg("forget_dead"),
           "Those that are open, and those that died and were not forgotten since.")
      .def("progress", &Publisher::progress)
      .def(
          "wait",
          [](Publisher& publisher, uint32_t progress, double seconds) {
            without_gil([&] { publisher.wait(progress, seconds); });
          },
          py::arg("progress"), py::arg("seconds"))
      .def("finish", &Publisher::finish)
      .def("close", &Publisher::close);

  py::enum_<PublisherState>(m, "PublisherState")
      .value("open", PublisherState::open)
      .value("closed", PublisherState::closed)
      .value("dead", PublisherState::dead);

  py::class_<Reader, std::shared_ptr<Reader>>(m, "Reader", "A reading end of a weight channel.")
      .def(py::init<int64_t, int, const std::string&>(), py::arg("pid"), py::arg("fd"),
           py::arg("session"))
      .def("applied", &Reader::applied, py::arg("version"))
      .def("version", &Reader::version, "The published version, -1 before the first.")
      .def(
          "wait",
          [](Reader& reader, int64_t version, double seconds) {
            without_gil([&] { reader.wait(version, seconds); });
          },
          py::arg("version"), py::arg("seconds"))
      .def("publisher", &Reader::publisher)
      .def("publisher_pid", &Reader::publisher_pid)
      .def("manifest", [](const Reader& reader) { return py::bytes(reader.manifest()); })
      .def("require_open", &Reader::require_open)
      .def("slot_count", [](const Reader& reader) { return reader.geometry().slots; })
      .def("slot_tensor", &slot_tensor<Reader>, py::arg("slot"), py::arg("bytes"), py::arg("lease"))
      .def("leased", &Reader::leased, "The slots that are leased.")
      .def("end_leases", &Reader::end_leases, "No lease is held any more, but for those of slots.")
      .def("close", &Reader::close);

  py::class_<PythonLease>(m, "Lease", "A version, or a slot, that is leased while this says so.")
      .def(py::init<std::shared_ptr<Reader>, bool>(), py::arg("end"), py::arg("apply"))
      .def(py::init<std::shared_ptr<Reader>, int>(), py::arg("end"), py::arg("slot"))
      .def(py::init<const PythonLease&>(), py::arg("other"))
      .def_readwrite("before_release", &PythonLease::before_release)
      .def_property_readonly("held", &PythonLease::held)
      .def_property_readonly("slot", &PythonLease::slot)
      .def_property_readonly("version", &PythonLease::version)
      .def("release", &PythonLease::release)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](PythonLease& lease, const py::args&) { lease.release(); });

  py::class_<PythonWrite>(m, "Write", "A slot that is written, given up unless it is committed.")
      .def(py::init<std::shared_ptr<Publisher>>(), py::arg("end"))
      .def_readwrite("before_release", &PythonWrite::before_release)
      .def_property_readonly("slot", &PythonWrite::slot, "None if no slot is owned.")
      .def_readwrite("version", &PythonWrite::version)
      .def("abort", &PythonWrite::abort)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](PythonWrite& write, const py::object& kind, const py::args&) {
        kind.is_none() ? write.commit() : write.abort();
      });

  m.def("copy_pieces", &copy_pieces, py::arg("pieces"), py::arg("threads"),
        "Copy memory, each piece (target, source, elements, bytes of one, float32 to bfloat16).");
  m.def("channel_steps",
        [] { return std::vector<std::string>(std::begin(step_names), std::end(step_names)); });
  m.def("signal_at", &signal_at, py::arg("step"), py::arg("signal"),
        "Raise a signal in this process whenever it gets to a step: for tests of crashes.");
}

}  // namespace fusedrl
