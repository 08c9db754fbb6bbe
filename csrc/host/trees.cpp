#include "host/trees.h"

#include <utility>
#include <vector>

#include "host/python_objects.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

using Values = std::vector<py::object>;

// The kind of an object, which follows from its class unless it is a tensor.
enum class Kind { tensor, tensor_subclass, dict, stack, tensorclass, other };

// Interned, so that looking one up compares pointers.
struct Names {
  py::object entries = interned("_tensordict"), fields = interned("_non_tensordict"),
             batch_size = interned("_batch_size"), device = interned("_device"),
             names = interned("_td_dim_names"), rows = interned("tensordicts"),
             stack_dim = interned("stack_dim"), stack_name = interned("_td_dim_name"),
             hook_in = interned("hook_in"), hook_out = interned("hook_out"),
             locked = interned("_is_locked"), next = interned("next"), dtype = interned("dtype"),
             nested = interned("is_nested");
};

py::object get(const py::object& object, const py::object& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

// Bypasses any __setattr__ of the class.
void set(const py::object& object, const py::object& name, const py::object& value) {
  if (PyObject_GenericSetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

void put(const py::object& dict, const py::object& key, const py::object& value) {
  if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) throw py::error_already_set();
}

// A new object of the class of another one, without a call of its constructors.
py::object empty_like(const py::object& object) {
  return checked(PyBaseObject_Type.tp_new(Py_TYPE(object.ptr()), py::tuple().ptr(), nullptr));
}

bool is_unchanging(const py::object& value) {
  PyObject* object = value.ptr();
  return object == Py_None || PyUnicode_CheckExact(object) || PyLong_CheckExact(object) ||
         PyBool_Check(object) || PyFloat_CheckExact(object) || PyBytes_CheckExact(object);
}

// An empty tensordict with the shape and the device of another one.
py::object tensordict_like(const Names& names, const py::object& of, const py::object& entries) {
  py::object made = empty_like(of);
  set(made, names.device, get(of, names.device));
  set(made, names.entries, entries);
  set(made, names.batch_size, get(of, names.batch_size));
  py::object dims = get(of, names.names);
  set(made, names.names, dims.is_none() ? dims : checked(PySequence_List(dims.ptr())));
  return made;
}

// Tensors to be cloned together, those of several rows under one key, and where the clones belong.
struct Column {
  py::list tensors;
  Values homes;  // dictionaries
  py::object key;
  bool is_next;
};

// Where a value of a turn is. Below its first keys, "next" is a name like any other.
enum class Part { root, inside, next };

class Trees {
 public:
  Trees(py::object tensor, py::object kind_of, py::object clone, py::object deepcopy)
      : tensor_(std::move(tensor)),
        kind_of_(std::move(kind_of)),
        clone_(std::move(clone)),
        deepcopy_(std::move(deepcopy)) {}

  Kind kind(const py::object& value) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
    if (type == tensor_.ptr()) return Kind::tensor;
    PyObject* known = PyDict_GetItemWithError(kinds_.ptr(), type);
    if (known != nullptr) return static_cast<Kind>(PyLong_AsLong(known));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    Kind kind = kind_of_(py::handle(type)).cast<Kind>();
    kinds_[py::handle(type)] = static_cast<int>(kind);
    return kind;
  }

  py::object clone(const py::object& value) const { return clone_(value); }

  // A copy of the values of a tensorclass that are no tensors.
  py::dict copy_of_fields(const py::dict& fields) const {
    py::dict copies;
    for (auto [name, field] : fields) {
      const py::object value = py::reinterpret_borrow<py::object>(field);
      copies[name] = is_unchanging(value) ? value : deepcopy_(value);
    }
    return copies;
  }
  const Names& names() const { return names_; }

 private:
  py::object tensor_, kind_of_, clone_, deepcopy_;
  py::dict kinds_;
  Names names_;
};

// One pass over a tree. It either copies the tree, with columns that are still to be filled, or
// only gathers the columns, except those under the turn's "next".
class Walk {
 public:
  Walk(const Trees& trees, bool copies) : trees_(trees), names_(trees.names()), copies_(copies) {}

  py::object copy(const py::object& value) { return copy(value, Part::root); }

  std::vector<Column>& columns() { return columns_; }

 private:
  py::object copy(const py::object& value, Part part) {
    switch (trees_.kind(value)) {
      case Kind::dict:
        return std::move(rows({value}, part)[0]);
      case Kind::stack:
        return stack(value, part);
      case Kind::tensorclass:
        return tensorclass(value, part);
      default:
        return copies_ ? trees_.clone(value) : py::none();
    }
  }

  // Visits tensordicts, key by key if all have the same keys.
  Values rows(const Values& rows, Part part) {
    Values entries, made(rows.size()), homes(rows.size());
    for (const py::object& row : rows) entries.push_back(get(row, names_.entries));
    const py::list keys = checked(PyDict_Keys(entries[0].ptr()));
    if (!all_have(entries, keys)) {
      Values apart;
      for (const py::object& row : rows) apart.push_back(std::move(this->rows({row}, part)[0]));
      return apart;
    }
    for (size_t row = 0; copies_ && row < rows.size(); ++row) {
      homes[row] = py::dict();
      made[row] = tensordict_like(names_, rows[row], homes[row]);
    }
    for (py::handle handle : keys) {
      const py::object key = py::reinterpret_borrow<py::object>(handle);
      const bool is_next = part == Part::next || (part == Part::root && key.equal(names_.next));
      if (is_next && !copies_) continue;
      Values values;
      for (const py::object& entry : entries) {
        PyObject* value = PyDict_GetItemWithError(entry.ptr(), key.ptr());
        if (value == nullptr) throw py::key_error("a tensordict changed while it was copied");
        values.push_back(py::reinterpret_borrow<py::object>(value));
      }
      column(values, homes, key, is_next ? Part::next : Part::inside);
    }
    return made;
  }

  static bool all_have(const Values& entries, const py::list& keys) {
    for (const py::object& entry : entries) {
      if (!PyDict_Check(entry.ptr())) throw py::type_error("expected tensordicts of dictionaries");
      if (PyDict_GET_SIZE(entry.ptr()) != PyList_GET_SIZE(keys.ptr())) return false;
      if (&entry == &entries[0]) continue;
      for (py::handle key : keys) {
        if (PyDict_Contains(entry.ptr(), key.ptr()) != 1) return false;
      }
    }
    return true;
  }

  // Copies the values that several rows have under one key into the copies of the rows.
  void column(const Values& values, const Values& homes, const py::object& key, Part part) {
    if (are_alike(values)) {
      add(values, homes, key, part);
      return;
    }
    if (are_dicts(values)) {
      Values made = rows(values, part);
      for (size_t row = 0; copies_ && row < made.size(); ++row) put(homes[row], key, made[row]);
      return;
    }
    for (size_t row = 0; row < values.size(); ++row) {
      const Kind kind = trees_.kind(values[row]);
      if (kind == Kind::tensor || kind == Kind::tensor_subclass) {
        add({values[row]}, {homes[row]}, key, part);
        continue;
      }
      py::object made = copy(values[row], part);
      if (copies_) put(homes[row], key, made);
    }
  }

  bool are_dicts(const Values& values) const {
    for (const py::object& value : values) {
      if (trees_.kind(value) != Kind::dict) return false;
    }
    return true;
  }

  // Whether values are tensors of one dtype that can be stacked, if their shapes and devices fit.
  bool are_alike(const Values& values) const {
    py::object dtype;
    for (const py::object& value : values) {
      if (trees_.kind(value) != Kind::tensor) return false;
      if (values.size() == 1) return true;
      py::object its = get(value, names_.dtype);
      if (dtype && !its.is(dtype)) return false;
      if (get(value, names_.nested).ptr() != Py_False) return false;
      dtype = std::move(its);
    }
    return true;
  }

  void add(const Values& values, const Values& homes, const py::object& key, Part part) {
    py::list tensors(values.size());
    for (size_t row = 0; row < values.size(); ++row) tensors[row] = values[row];
    // The keys keep their order.
    for (size_t row = 0; copies_ && row < homes.size(); ++row) put(homes[row], key, py::none());
    columns_.push_back({std::move(tensors), copies_ ? homes : Values(), key, part == Part::next});
  }

  py::object stack(const py::object& of, Part part) {
    const py::list rows = get(of, names_.rows);
    Values values, copies;
    for (py::handle row : rows) values.push_back(py::reinterpret_borrow<py::object>(row));
    if (are_dicts(values) && !values.empty()) {
      copies = this->rows(values, part);
    } else {
      for (const py::object& value : values) copies.push_back(copy(value, part));
    }
    if (!copies_) return py::none();
    py::list stacked(copies.size());
    for (size_t row = 0; row < copies.size(); ++row) stacked[row] = copies[row];
    py::object made = empty_like(of);
    set(made, names_.locked, py::none());
    set(made, names_.rows, stacked);
    const std::initializer_list<const py::object*> kept = {&names_.stack_dim, &names_.batch_size,
                                                           &names_.hook_in, &names_.hook_out};
    for (const py::object* name : kept) set(made, *name, get(of, *name));
    py::object stack_name = get(of, names_.stack_name);
    if (!stack_name.is_none()) set(made, names_.stack_name, stack_name);
    return made;
  }

  py::object tensorclass(const py::object& of, Part part) {
    const py::object state = checked(PyObject_GenericGetDict(of.ptr(), nullptr));
    py::object entries = copy(py::object(state[names_.entries]), part);
    if (!copies_) return entries;
    py::object made = empty_like(of);
    const py::object copied = checked(PyObject_GenericGetDict(made.ptr(), nullptr));
    if (PyDict_Update(copied.ptr(), state.ptr()) != 0) throw py::error_already_set();
    put(copied, names_.entries, entries);
    put(copied, names_.fields, trees_.copy_of_fields(state[names_.fields]));
    return made;
  }

  const Trees& trees_;
  const Names& names_;
  const bool copies_;
  std::vector<Column> columns_;
};

py::list columns_of(const Trees& trees, const py::object& value) {
  Walk walk(trees, false);
  walk.copy(value);
  py::list columns;
  for (Column& column : walk.columns()) columns.append(std::move(column.tensors));
  return columns;
}

py::object copy(const Trees& trees, const py::object& value, const py::object& clone) {
  Walk walk(trees, true);
  py::object made = walk.copy(value);
  py::list before, next;
  for (Column& column : walk.columns()) (column.is_next ? next : before).append(column.tensors);
  const py::sequence clones = clone(before, next);
  if (py::len(clones) != walk.columns().size()) throw py::value_error("clone: a list for a column");
  size_t of_before = 0, of_next = py::len(before);
  for (Column& column : walk.columns()) {
    const py::sequence cloned = clones[column.is_next ? of_next++ : of_before++];
    for (size_t row = 0; row < column.homes.size(); ++row) {
      put(column.homes[row], column.key, cloned[row]);
    }
  }
  return made;
}

// The entries of a plain tensordict, for reading; null for anything else.
py::object entries_of(const Trees& trees, const py::object& value) {
  return trees.kind(value) == Kind::dict ? get(value, trees.names().entries) : py::object();
}

// Gives the tensorclasses in a tree objects of their own.
void own_objects(const Trees& trees, const py::object& value) {
  const Names& names = trees.names();
  switch (trees.kind(value)) {
    case Kind::dict:
      for (auto [key, entry] : py::dict(get(value, names.entries))) {
        own_objects(trees, py::reinterpret_borrow<py::object>(entry));
      }
      return;
    case Kind::stack:
      for (py::handle row : py::list(get(value, names.rows))) {
        own_objects(trees, py::reinterpret_borrow<py::object>(row));
      }
      return;
    case Kind::tensorclass: {
      const py::dict state = checked(PyObject_GenericGetDict(value.ptr(), nullptr));
      own_objects(trees, py::object(state[names.entries]));
      put(state, names.fields, trees.copy_of_fields(state[names.fields]));
      return;
    }
    default:
      return;
  }
}

// The elements as Python makes them, which share the objects that stand for several of them.
py::list unbound(const Trees& trees, const py::object& value, bool own) {
  const py::list rows(value.attr("unbind")(0));
  for (size_t row = 1; own && row < rows.size(); ++row) own_objects(trees, rows[row]);
  return rows;
}

// The elements of a plain tensordict along its first dimension: views of its tensors; `own` gives
// each objects of its own.
py::list rows_of(const Trees& trees, const py::object& value, bool own) {
  const Names& names = trees.names();
  const Kind kind = trees.kind(value);
  if (kind == Kind::stack && get(value, names.stack_dim).equal(py::int_(0))) {
    return checked(PySequence_List(get(value, names.rows).ptr()));
  }
  if (kind != Kind::dict || get(value, names.locked).ptr() != Py_False ||
      !get(value, names.names).is_none()) {
    return unbound(trees, value, own);
  }
  const py::object sizes = get(value, names.batch_size);
  const py::object size_of_row = sizes[py::slice(1, std::nullopt, std::nullopt)];
  const py::object device = get(value, names.device);
  std::vector<py::dict> entries(py::len(sizes) == 0 ? 0 : sizes[py::int_(0)].cast<size_t>());
  for (auto [key, entry] : py::dict(get(value, names.entries))) {
    const py::list parts = rows_of(trees, py::reinterpret_borrow<py::object>(entry), own);
    if (parts.size() != entries.size()) throw py::value_error("expected a row for each element");
    const py::object name = py::reinterpret_borrow<py::object>(key);
    for (size_t row = 0; row < entries.size(); ++row) put(entries[row], name, parts[row]);
  }
  py::list rows(entries.size());
  for (size_t row = 0; row < entries.size(); ++row) {
    py::object made = empty_like(value);
    set(made, names.device, device);
    set(made, names.entries, entries[row]);
    set(made, names.batch_size, size_of_row);
    set(made, names.names, py::none());
    rows[row] = made;
  }
  return rows;
}

// What the tensordicts of rows have under a path of keys; None unless all are plain ones and have
// it.
py::object under(const Trees& trees, const py::list& rows, const py::args& path) {
  py::list values(rows.size());
  for (size_t row = 0; row < rows.size(); ++row) {
    py::object value = rows[row];
    for (py::handle key : path) {
      const py::object entries = entries_of(trees, value);
      PyObject* entry = entries ? PyDict_GetItemWithError(entries.ptr(), key.ptr()) : nullptr;
      if (entry == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        return py::none();
      }
      value = py::reinterpret_borrow<py::object>(entry);
    }
    values[row] = value;
  }
  return values;
}

bool can_take(const Trees& trees, const py::object& row, const py::object& name) {
  const py::object entries = entries_of(trees, row);
  return entries && PyDict_Contains(entries.ptr(), name.ptr()) == 0 &&
         get(row, trees.names().locked).ptr() == Py_False;
}

// Gives each row a tensordict of one entry. Nothing is given, and false returned, unless all rows
// are plain ones without that name, and not locked.
bool nest(const Trees& trees, const py::list& rows, const py::object& name, const py::object& key,
          const py::sequence& values) {
  for (py::handle row : rows) {
    if (!can_take(trees, py::reinterpret_borrow<py::object>(row), name)) return false;
  }
  for (size_t row = 0; row < rows.size(); ++row) {
    const py::object of = rows[row];
    py::dict entries;
    put(entries, key, values[row]);
    put(get(of, trees.names().entries), name, tensordict_like(trees.names(), of, entries));
  }
  return true;
}

}  // namespace

void bind_trees(py::module_& m) {
  py::enum_<Kind>(m, "TreeKind", "What an object in a tree is.")
      .value("tensor_subclass", Kind::tensor_subclass)
      .value("dict", Kind::dict)
      .value("stack", Kind::stack)
      .value("tensorclass", Kind::tensorclass)
      .value("other", Kind::other);
  py::class_<Trees>(m, "Trees", "Copies of nested objects of tensors.")
      .def(py::init<py::object, py::object, py::object, py::object>(), py::arg("tensor"),
           py::arg("kind_of"), py::arg("clone"), py::arg("deepcopy"))
      .def("columns", &columns_of, py::arg("value"),
           "The tensors outside of 'next', a list for each key that rows have in common.")
      .def("copy", &copy, py::arg("value"), py::arg("clone"),
           "A copy, with the tensors that clone returns for the columns outside of 'next' and for "
           "those in it.")
      .def("rows_of", &rows_of, py::arg("value"), py::arg("own"),
           "The elements along the first dimension, as unbind(0) returns them; with own, none "
           "shares a Python object with another.")
      .def("under", &under, py::arg("rows"),
           "What plain tensordicts have under a path of keys; None unless all are and have it.")
      .def("nest", &nest, py::arg("rows"), py::arg("name"), py::arg("key"), py::arg("values"),
           "Give each tensordict one of its shape with one entry. False, and nothing is given, "
           "where one is not plain, is locked or has the name.");
}

}  // namespace fusedrl
