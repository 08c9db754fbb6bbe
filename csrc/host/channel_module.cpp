// The two ends of a weight channel for Python.
#include "host/channel_module.h"

#include <pybind11/stl.h>

#include <algorithm>
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

// Runs `work` without the GIL. py::gil_scoped_release would not do: when the interpreter ends,
// taking the GIL back ends a daemon thread by unwinding its stack, which terminates the process in
// a destructor.
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

std::shared_ptr<Publisher> make_publisher(uint64_t slots, uint64_t slot_bytes, uint64_t max_readers,
                                          const std::string& session, const std::string& manifest) {
  const Geometry geometry{slots, slot_bytes, max_readers, manifest.size()};
  std::unique_ptr<MemoryFile> file = MemoryFile::create();
  for (bool reserved = false; !reserved;) {
    without_gil([&] { reserved = file->reserve(geometry.file_bytes()); });
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  return std::make_shared<Publisher>(std::move(file), geometry, session, manifest);
}

// Errors of the kernel become OSError with their errno, since only the caller knows a remedy.
void raise_os_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::system_error& refused) {
    py::object arguments = py::make_tuple(refused.code().value(), refused.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

// For destructors, which can only report an error of Python, such as an interrupt.
template <class GiveBack>
void in_destructor(const GiveBack& give_back) {
  try {
    give_back();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a slot of a weight channel");
  } catch (const std::exception&) {  // the end is closed, which has released the slot
  }
}

// Deletes a lease that Python drops.
struct Dropped {
  void operator()(Lease* lease) const {
    // Its hook may need a module that is gone; the process ends, which releases the slot.
    if (dlpack::is_finalizing()) return;
    in_destructor([&] { lease->release(); });
    delete lease;
  }
};

// A slot that is being written: published as `version` or given up, at the latest when this is
// destroyed. `before_release` is called first; nothing is published if it raises. In a forked child
// this owns nothing.
class Write {
 public:
  explicit Write(std::shared_ptr<Publisher> end) : end_(std::move(end)), slot_(end_->try_begin()) {}
  ~Write() {
    in_destructor([&] { end(false); });
  }

  // Publishing throws std::runtime_error once the channel is closed, or in a forked child.
  void end(bool publishes) {
    if (publishes) end_->require_open();
    if (!slot_ || !end_->is_open()) return;
    const int slot = *std::exchange(slot_, std::nullopt);
    try {
      if (!before_release.is_none()) before_release();
    } catch (...) {
      end_->abort();
      throw;
    }
    publishes ? end_->commit(slot, version) : end_->abort();
  }
  std::optional<int> slot() const { return slot_; }

  py::object before_release = py::none();
  int64_t version = no_version;

 private:
  std::shared_ptr<Publisher> end_;
  std::optional<int> slot_;
};

// Owned by the frame of a `with` block, so that no signal handler runs between the end of the block
// and the release of what it holds.
struct Held {
  py::object value, things;
};

// The tensor owns the mapping, which therefore outlives the closing of the channel.
template <class End>
py::capsule slot_tensor(const End& end, int slot, uint64_t bytes) {
  return dlpack::uint8_tensor(end.slot(slot), static_cast<int64_t>(bytes), {dlpack::kCpu, 0},
                              end.slots());
}

py::capsule device_tensor(int device, uintptr_t address, int64_t bytes, py::object owner) {
  return dlpack::uint8_tensor(reinterpret_cast<void*>(address), bytes, {dlpack::kCuda, device},
                              dlpack::keep_alive(std::move(owner)));
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
  if (std::find(std::begin(steps), std::end(steps), step) == std::end(steps))
    throw std::invalid_argument("step: expected one of channel_steps(), got '" + step + "'");
  signal_step = step;
  signal_number = signal;
}

}  // namespace

void bind_channel(py::module_& m) {
  py::register_local_exception_translator(&raise_os_error);

  py::class_<Publisher, std::shared_ptr<Publisher>>(m, "Publisher",
                                                    "The writing end of a weight channel.")
      .def(py::init(&make_publisher), py::arg("slots"), py::arg("slot_bytes"),
           py::arg("max_readers"), py::arg("session"), py::arg("manifest"))
      .def("version", &Publisher::version, "The published version, -1 before the first.")
      .def("writing", &Publisher::writing, "Whether a slot is being written.")
      .def("fd", &Publisher::fd)
      .def("slot_count", &Publisher::slot_count)
      .def("slot_tensor", &slot_tensor<Publisher>, py::arg("slot"), py::arg("bytes"))
      .def("readers", &Publisher::readers, py::arg("forget_dead"),
           "(pid, alive, leased versions, applied version, -1 if none) of each reader.")
      .def("progress", &Publisher::progress)
      .def(
          "wait",
          [](Publisher& publisher, uint32_t progress, double seconds) {
            without_gil([&] { publisher.wait(progress, seconds); });
          },
          py::arg("progress"), py::arg("seconds"))
      .def("finish", &Publisher::finish)
      .def("close", &Publisher::close);

  py::class_<Reader, std::shared_ptr<Reader>>(m, "Reader", "A reading end of a weight channel.")
      .def(py::init<int64_t, int, const std::string&>(), py::arg("pid"), py::arg("fd"),
           py::arg("session"))
      .def("version", &Reader::version, "The published version, -1 before the first.")
      .def(
          "wait",
          [](Reader& reader, int64_t version, double seconds) {
            without_gil([&] { reader.wait(version, seconds); });
          },
          py::arg("version"), py::arg("seconds"))
      .def("ended", &Reader::ended, "How the publisher has ended, None while it has not.")
      .def("publisher_pid", &Reader::publisher_pid)
      .def("manifest", [](const Reader& reader) { return py::bytes(reader.manifest()); })
      .def("require_open", &Reader::require_open)
      .def("is_open", &Reader::is_open)
      .def("slot_tensor", &slot_tensor<Reader>, py::arg("slot"), py::arg("bytes"))
      .def("leases", &Reader::leases, "Whether a slot is leased.")
      .def("close", &Reader::close);

  py::class_<Lease, std::unique_ptr<Lease, Dropped>>(m, "Lease", "A version that is leased.")
      .def(py::init<std::shared_ptr<Reader>>(), py::arg("end"))
      .def(py::init<const Lease&>(), py::kw_only(), py::arg("of"))
      // Not std::function through pybind11/functional.h, for the reason given at without_gil().
      .def_property("before_release", nullptr,
                    [](Lease& lease, const py::object& call) {
                      if (call.is_none())
                        lease.before_release = nullptr;
                      else
                        lease.before_release = [call](uintptr_t given) { call(given); };
                    })
      .def_property_readonly("held", &Lease::held)
      .def_property_readonly("slot", &Lease::slot)
      .def_property_readonly("version", &Lease::version)
      .def("release", &Lease::release)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](Lease& lease, const py::args&) { lease.release(); });
  // A C function that any thread can call without the GIL.
  m.attr("give_back") =
      reinterpret_cast<uintptr_t>(+[](void* lease) { delete static_cast<Lease*>(lease); });

  py::class_<Write>(m, "Write", "A slot that is written, given up unless it is committed.")
      .def(py::init<std::shared_ptr<Publisher>>(), py::arg("end"))
      .def_readwrite("before_release", &Write::before_release)
      .def_property_readonly("slot", &Write::slot, "None if no slot is owned.")
      .def_readwrite("version", &Write::version)
      .def("abort", [](Write& write) { write.end(false); })
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](Write& write, const py::object& kind, const py::args&) {
        write.end(kind.is_none());
      });

  py::class_<Held>(m, "Held", "A block with a value, which drops other things when it ends.")
      .def(py::init([](py::object value, py::args things) { return Held{value, things}; }))
      .def_readonly("value", &Held::value)
      .def("__enter__", [](const Held& held) { return held.value; })
      .def("__exit__", [](Held& held, const py::args&) { held.things = py::none(); });

  m.def("device_tensor", &device_tensor, py::arg("device"), py::arg("address"), py::arg("bytes"),
        py::arg("owner"),
        "A DLPack capsule of flat memory of a GPU; tensors over it keep the owner.");
  m.def("copy_pieces", &copy_pieces, py::arg("pieces"), py::arg("threads"),
        "Copy memory, each piece (target, source, elements, bytes of one, float32 to bfloat16).");
  m.def("channel_steps",
        [] { return std::vector<std::string>(std::begin(steps), std::end(steps)); });
  m.def("signal_at", &signal_at, py::arg("step"), py::arg("signal"),
        "Raise a signal in this process whenever it gets to a step: for tests of crashes.");
}

}  // namespace fusedrl
