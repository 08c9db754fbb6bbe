"""Replacing what a package's modules hold, on made-up packages."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from types import ModuleType

import pytest

from fusedrl import patching
from fusedrl.patching import Replacement, replace

HOME = """
class Thing:
    def __init__(self, value=0):
        self.value = value

def make():
    return Thing()

def twice(x):
    return 2 * x
"""
SOURCES = {
    "toys": "from toys.shelf import Thing as Toy, twice\n__all__ = ['Toy', 'twice']",
    "toys.shelf": HOME,
    "toys.box": "from toys.shelf import Thing, make, twice",
}


def load(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(source, vars(module))
    return module


@pytest.fixture
def toys(monkeypatch):
    """The package ``toys``: a class and a function at home in ``shelf``, imported elsewhere."""
    for name in (*SOURCES, "toys.late", "user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("toys.shelf", "toys", "toys.box"):
        load(name, SOURCES[name])
    yield sys.modules["toys"]
    for name in (*SOURCES, "toys.late", "user"):
        sys.modules.pop(name, None)


@pytest.fixture
def better(toys):
    class Better(sys.modules["toys.shelf"].Thing):
        pass

    return Better


def snapshot() -> dict[str, dict]:
    return {name: dict(vars(sys.modules[name])) for name in SOURCES}


def test_every_name_of_the_object_is_replaced(toys, better):
    shelf, box = sys.modules["toys.shelf"], sys.modules["toys.box"]
    old = shelf.Thing
    report = replace("toys", [Replacement("toys.shelf", "Thing", better)])
    assert shelf.Thing is toys.Toy is box.Thing is better
    assert {(c.module, c.name) for c in report} == {
        ("toys.shelf", "Thing"),
        ("toys", "Toy"),
        ("toys.box", "Thing"),
    }
    assert all(c.old is old and c.new is better and not c.added for c in report)
    assert len(report.changes) == 3 and report.active
    assert type(box.make()) is better
    assert toys.__all__ == ["Toy", "twice"] and old.__module__ == "toys.shelf"
    report.revert()


def test_revert_restores_the_very_same_objects(toys, better):
    before = snapshot()
    report = replace("toys", [Replacement("toys.shelf", "Thing", better)])
    assert snapshot() != before
    report.revert()
    assert snapshot() == before and not report.active
    sys.modules["toys.shelf"].Thing = better
    report.revert()
    assert sys.modules["toys.shelf"].Thing is better


def test_functions_are_replaced_like_classes(toys):
    with replace("toys", [Replacement("toys.shelf", "twice", abs)]) as report:
        assert toys.twice is sys.modules["toys.box"].twice is abs
        assert "toys.box.twice -> builtins.abs" in str(report)
    assert toys.twice(2) == 4


def test_the_block_reverts_although_it_raises(toys, better):
    before = snapshot()
    with (
        pytest.raises(ZeroDivisionError),
        replace("toys", [Replacement("toys.shelf", "Thing", better)]),
    ):
        _ = 1 / 0
    assert snapshot() == before


def test_a_second_patch_changes_nothing_and_says_so(toys, better):
    before = snapshot()
    wanted = [Replacement("toys.shelf", "Thing", better)]
    first, second = replace("toys", wanted), replace("toys", wanted)
    assert second.changes == () and second.already == ("Thing",)
    assert "replaced by an earlier patch: Thing" in str(second)
    second.revert()
    assert sys.modules["toys.shelf"].Thing is better
    first.revert()
    assert snapshot() == before


def test_patches_revert_in_any_order(toys, better):
    before = snapshot()
    thing, twice = (
        Replacement("toys.shelf", "Thing", better),
        Replacement("toys.shelf", "twice", abs),
    )
    first, second = replace("toys", [thing]), replace("toys", [thing, twice])
    first.revert()
    assert toys.twice is abs and toys.Toy is not better
    again = replace("toys", [thing])
    second.revert()
    assert toys.Toy is better and toys.twice is not abs
    again.revert()
    assert snapshot() == before


def test_a_module_imported_under_the_patch_gets_the_new_and_later_the_old(toys, better):
    with replace("toys", [Replacement("toys.shelf", "Thing", better)]):
        late = load("toys.late", "from toys import Toy as Late")
        assert late.Late is better
    assert late.Late is toys.Toy is not better


def test_what_was_ours_before_the_patch_stays(toys, better):
    toys.Mine = better
    with replace("toys", [Replacement("toys.shelf", "Thing", better)]):
        pass
    assert toys.Mine is better


def test_a_global_changed_under_the_patch_stays_and_is_logged(toys, better, caplog):
    with (
        caplog.at_level(logging.WARNING, "fusedrl"),
        replace("toys", [Replacement("toys.shelf", "Thing", better)]),
    ):
        toys.Toy = int
    assert toys.Toy is int and sys.modules["toys.shelf"].Thing is not better
    assert "toys.Toy was changed" in caplog.text


def test_a_missing_name_is_added_and_removed(toys, better):
    wanted = [Replacement("toys.shelf", "Former", better, add_to=("toys.shelf", "toys"))]
    with replace("toys", wanted) as report:
        assert toys.Former is sys.modules["toys.shelf"].Former is better
        assert [c.added for c in report] == [True, True]
        assert "toys.Former added:" in str(report)
        assert replace("toys", wanted).changes == ()
    assert not hasattr(toys, "Former") and not hasattr(sys.modules["toys.shelf"], "Former")


def test_a_missing_name_is_refused_before_anything_changes(toys, better):
    before = snapshot()
    with pytest.raises(ValueError, match=r"toys\.box: expected it to have Nothing"):
        replace(
            "toys",
            [Replacement("toys.shelf", "Thing", better), Replacement("toys.box", "Nothing", abs)],
        )
    assert snapshot() == before


def test_other_packages_are_reported_and_left_alone(toys, better, monkeypatch):
    user = load("user", "import toys.shelf\nfrom toys import Toy as Mine")
    monkeypatch.setitem(sys.modules, "another_name_of_user", user)
    user.toys = None
    old = user.Mine
    with replace("toys", [Replacement("toys.shelf", "Thing", better)]) as report:
        assert user.Mine is old
        assert ("user", "Mine") in report.held
        assert "user.Mine" in str(report)
        again = replace("toys", [Replacement("toys.shelf", "Thing", better)])
        assert ("user", "Mine") in again.held


@pytest.mark.heavy
def test_threads_that_patch_at_once_do_not_meet(toys, better, caplog):
    before = snapshot()
    errors = []

    def work():
        try:
            for _ in range(5):
                with replace("toys", [Replacement("toys.shelf", "Thing", better)]):
                    pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # few rounds meet each other otherwise
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == [] and snapshot() == before and not patching._originals
    assert caplog.text == ""  # nobody found a global changed by another


@pytest.fixture
def heirs(toys, better):
    """A class that inherits a method from ``Thing``, and one that has its own."""
    thing = sys.modules["toys.shelf"].Thing
    thing.size = lambda self: 1

    class Own(thing):
        def size(self):
            return 2

    return thing, better, Own


def test_a_method_is_replaced_in_its_class_and_what_inherits_it(heirs):
    thing, heir, own = heirs
    old, instance = thing.size, heir()

    def larger(self):
        return 10 + old(self)

    wanted = [Replacement("toys.shelf", "Thing.size", larger)]
    report = replace("toys", wanted)
    assert [thing().size(), instance.size(), own().size()] == [11, 11, 2]
    assert [(c.module, c.name, c.old) for c in report] == [("toys.shelf", "Thing.size", old)]
    assert pickle.loads(pickle.dumps(thing(3))).value == 3
    again = replace("toys", wanted)
    assert again.changes == () and again.already == ("Thing.size",)
    again.revert()
    assert thing.size is larger
    report.revert()
    assert thing.size is old and instance.size() == 1


def test_a_method_that_was_changed_under_the_patch_is_left_alone(heirs, caplog):
    thing, *_ = heirs
    with replace("toys", [Replacement("toys.shelf", "Thing.size", abs)]):
        thing.size = len
    assert thing.size is len
    assert "toys.shelf.Thing.size was changed under the patch" in caplog.text


@pytest.mark.parametrize("name", ["Thing.weight", "Nothing.size", "twice.size"])
def test_a_method_that_is_not_there_is_refused(heirs, name):
    with pytest.raises(ValueError, match=f"expected it to have {name}, got none"):
        replace("toys", [Replacement("toys.shelf", name, abs)])


def test_names_are_chosen_once_each_and_all_by_default():
    assert patching.chosen_of(["B", "B"], ["A", "B"]) == ["B"]
    assert patching.chosen_of(None, ["A", "B"]) == ["A", "B"]
