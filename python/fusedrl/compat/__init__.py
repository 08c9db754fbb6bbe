"""Private names of the libraries, each behind a word that says what we need of it.

A private name (it begins with an underscore, or stands in a module that does) may change with every
release of its library. So each stands once, in the module of its library here, and other packages
call it by our word. They import the module that they need, ``from fusedrl.compat import torchrl``:
none of them imports another library than its own, and what is expensive to import, or need not be
installed, is imported when a word is used.

A word is a function that reads, writes or calls the name, or a constant for what works by name.
``tests/private_names.py`` lists the names, and those that our subclasses of a library's classes
override or inherit. ``tests/compat/test_names.py`` looks all of them up in the installed libraries,
and ``test_<library>.py`` has a test where a name can stay and mean something else.
``tests/compat/test_private_names.py`` fails where a private name of a library is used elsewhere.

In ``pyproject.toml`` each of these libraries ends before the first minor version that the tests
have not passed with: a release that drops a name can fail in the middle of a training run, and one
that keeps a name and changes its meaning fails nowhere. To admit a release, run the tests with it,
then raise the bound. torch has no bound, since its build is chosen for a GPU and a driver, and
accelerate is no requirement of ours.
"""
