// The two ends of a weight channel for Python.
#include "host/channel_module.h"

#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <system_error>

#include "host/channel_blocks.h"
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
      .def("try_begin", &Publisher::try_begin, "Lock a slot that nobody leases, or None.")
      .def("commit", &Publisher::commit, py::arg("slot"), py::arg("version"))
      .def("abort", &Publisher::abort)
      .def("version", &Publisher::version, "The published version, -1 before the first.")
      .def("fd", &Publisher::fd)
      .def("share", &Publisher::share, "A descriptor for another process; the caller closes it.")
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
      .def("end_leases", &Reader::end_leases, "No lease is held any more, but for holds of slots.")
      .def("close", &Reader::close);
  bind_leases(m);

  m.def("copy_pieces", &copy_pieces, py::arg("pieces"), py::arg("threads"),
        "Copy memory, each piece (target, source, elements, bytes of one, float32 to bfloat16).");
  m.def("channel_steps",
        [] { return std::vector<std::string>(std::begin(step_names), std::end(step_names)); });
  m.def("signal_at", &signal_at, py::arg("step"), py::arg("signal"),
        "Raise a signal in this process whenever it gets to a step: for tests of crashes.");
}

}  // namespace fusedrl
