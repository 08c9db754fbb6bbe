"""Private names of the libraries, each behind a word that says what we need of it.

A private name (it begins with an underscore, or stands in a module that does) may change with every
release of its library. So each stands once, in the module of its library here, and other packages
call it by our word. They import the module that they need, ``from fusedrl.compat import torchrl``:
none of them imports another library than its own, and what is expensive to import, or need not be
installed, is imported when a word is used.

To add a word to ``compat/<library>.py``:

- A function that reads, writes or calls the name, under ``@LIBRARY.needs("module:Class.name")``.
  Its docstring says what we need; its first sentence is the reason in the error.
- An object of the library, as it stands: ``word = LIBRARY.take("module:name", "why")``.
- Names of methods that we override, replace or look for: ``LIBRARY.names("module:Class", ("_a",
  "_b"), "why")``, a tuple of these names. An override in a class body is written under the
  library's name, and stands here only to be checked.

``tests/compat/test_names.py`` looks all of them up, and ``test_<library>.py`` has a test where a
name can stay and mean something else. ``tests/compat/test_private_names.py`` fails where a private
name of a library is used elsewhere.

In ``pyproject.toml`` each of these libraries ends before the next minor version after ``tried``: a
release that drops a name can fail in the middle of a training run, and one that keeps a name and
changes its meaning fails nowhere. To admit a release, run the tests with it, then raise ``tried``
and the bound. torch has no bound, since its build is chosen for a GPU and a driver, and accelerate
is no requirement of ours. Whoever goes past a bound and lacks a name gets an ImportError that says
which, what for, and with which version we have tried it.
"""
