// The two ends of a weight channel for Python.
#include "host/channel_module.h"

#include <pybind11/stl.h>

#include "host/dlpack.h"
#include "host/publisher.h"
#include "host/reader.h"

namespace py = pybind11;

namespace fusedrl {

namespace {

using namespace channel;
using nogil = py::call_guard<py::gil_scoped_release>;

// `owner` keeps the mapping, so a tensor outlives the end of the channel that it came from.
template <class End>
py::capsule slot_tensor(const End& end, int slot, uint64_t bytes) {
  return dlpack::uint8_tensor(end.slot(slot), static_cast<int64_t>(bytes), {dlpack::kCpu, 0},
                              end.slots());
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
  py::class_<ReaderState>(m, "ReaderState", "One reader of a channel, as its publisher sees it.")
      .def_readonly("pid", &ReaderState::pid)
      .def_readonly("alive", &ReaderState::alive)
      .def_readonly("leased", &ReaderState::leased)
      .def_readonly("applied", &ReaderState::applied);

  py::class_<Publisher>(m, "Publisher", "The writing end of a weight channel.")
      .def(py::init<int, uint64_t, int, const std::string&, const std::string&>(), py::arg("slots"),
           py::arg("slot_bytes"), py::arg("max_readers"), py::arg("session"), py::arg("manifest"),
           nogil())
      .def("try_begin", &Publisher::try_begin, "Lock a slot that nobody leases, or None.")
      .def("commit", &Publisher::commit, py::arg("slot"), py::arg("version"), py::arg("checksum"))
      .def("abort", &Publisher::abort, py::arg("slot"))
      .def("version", &Publisher::version, "The published version, -1 before the first.")
      .def("fd", &Publisher::fd)
      .def("share", &Publisher::share, "A descriptor for another process; the caller closes it.")
      .def("slot_tensor", &slot_tensor<Publisher>, py::arg("slot"), py::arg("bytes"))
      .def("readers", &Publisher::readers, "Those that are open, and those that died since.")
      .def("progress", &Publisher::progress)
      .def("wait", &Publisher::wait, py::arg("progress"), py::arg("seconds"), nogil())
      .def("finish", &Publisher::finish)
      .def("close", &Publisher::close);

  py::enum_<PublisherState>(m, "PublisherState")
      .value("open", PublisherState::open)
      .value("closed", PublisherState::closed)
      .value("dead", PublisherState::dead);

  py::class_<Reader>(m, "Reader", "A reading end of a weight channel.")
      .def(py::init<int64_t, int, const std::string&>(), py::arg("pid"), py::arg("fd"),
           py::arg("session"))
      .def(
          "lease",
          [](Reader& reader, bool apply) -> py::object {
            const auto leased = reader.lease(apply);
            return leased ? py::object(py::make_tuple(leased->slot, leased->version)) : py::none();
          },
          py::arg("apply"), "(slot, version), or None before the first.")
      .def("release", &Reader::release, py::arg("slot"))
      .def("applied", &Reader::applied, py::arg("version"))
      .def("version", &Reader::version, "The published version, -1 before the first.")
      .def("wait", &Reader::wait, py::arg("version"), py::arg("seconds"), nogil())
      .def("publisher", &Reader::publisher)
      .def("publisher_pid", &Reader::publisher_pid)
      .def("checksum", &Reader::checksum, py::arg("slot"))
      .def("manifest", [](const Reader& reader) { return py::bytes(reader.manifest()); })
      .def("slot_count", &Reader::slot_count)
      .def("slot_bytes", &Reader::slot_bytes)
      .def("slot_tensor", &slot_tensor<Reader>, py::arg("slot"), py::arg("bytes"))
      .def("close", &Reader::close);

  m.def("channel_steps",
        [] { return std::vector<std::string>(std::begin(step_names), std::end(step_names)); });
  m.def("signal_at", &signal_at, py::arg("step"), py::arg("signal"),
        "Raise a signal in this process whenever it gets to a step: for tests of crashes.");
}

}  // namespace fusedrl
