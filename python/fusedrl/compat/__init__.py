"""Private names of other libraries, each behind a function or constant that fusedrl names.

A private name begins with an underscore, or is in a module that does, and may change with every
release of its library. So each is used in one place, the module of its library here, and other
packages use fusedrl's name. They import the module that they need, ``from fusedrl.compat import
torchrl``: it imports no other library than its own, and imports what is slow to import, or
optional, only when a function is called.

``tests/private_names.py`` lists the private names, and those that subclasses in fusedrl override or
inherit. ``tests/compat/test_names.py`` looks all of them up in the installed libraries, and
``test_<library>.py`` has a test where a name can stay and change its meaning.
``tests/compat/test_private_names.py`` fails where a private name of a library is used elsewhere.

In ``pyproject.toml`` each of these libraries has an upper bound, the first minor version that the
tests have not passed with: a release that drops a name can fail in the middle of a training run,
and one that keeps a name and changes its meaning fails nowhere. To admit a release, run the tests
with it, then raise the bound. torch has no bound, since its build is chosen for a GPU and a driver,
and accelerate is not required. ``requirements.py`` reads the bounds for error messages.
"""
