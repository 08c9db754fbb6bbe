"""The in-tree build backend: which torch and nvcc it takes, and why it cannot go on."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")
ROOT = Path(__file__).parents[1]
OF_PYPI = {"cmake.define.FUSEDRL_CUDA": "pypi", "cmake.define.FUSEDRL_CUDA_ARCHS": "80"}
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def make_torch(folder: Path, version: str = "2.13.0+cpu") -> Path:
    torch_dir = folder / "torch"
    (torch_dir / "include" / "torch").mkdir(parents=True)
    (torch_dir / "version.py").write_text(f"__version__ = '{version}'\n")
    return torch_dir


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The backend in an environment without any torch."""
    spec = importlib.util.spec_from_file_location("backend", ROOT / "setup_helpers" / "backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.sysconfig, "get_path", lambda scheme: str(empty))
    monkeypatch.setattr(module.site, "getusersitepackages", lambda: str(empty))
    monkeypatch.setattr(module.sys, "base_prefix", str(empty))
    monkeypatch.setenv("PATH", str(empty))
    for name in ("FUSEDRL_TORCH_DIR", "VIRTUAL_ENV", "CONDA_PREFIX", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(empty)
    return module


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
@pytest.mark.parametrize(
    "where", ["named", "purelib", "platlib", "VIRTUAL_ENV", "CONDA_PREFIX", "PATH", "cwd", "base"]
)
def test_environments_in_use(backend, monkeypatch, tmp_path, where, packages):
    """A named folder wins over the target of an isolated build by pip, and that over the others."""
    prefix = tmp_path / ".venv"
    found = make_torch(prefix / "lib" / PYTHON / packages)
    if where == "named":
        other = make_torch(tmp_path / "other").parent
        monkeypatch.setattr(backend.sysconfig, "get_path", lambda scheme: str(other))
        monkeypatch.setenv("FUSEDRL_TORCH_DIR", str(found))
    elif where.endswith("lib"):
        target = {where: str(found.parent)}
        monkeypatch.setattr(backend.sysconfig, "get_path", lambda name: target.get(name, "none"))
    elif where == "PATH":
        monkeypatch.setenv("PATH", str(prefix / "bin"))
    elif where == "cwd":
        monkeypatch.chdir(tmp_path)
    elif where == "base":
        monkeypatch.setattr(backend.sys, "base_prefix", str(prefix))
    else:
        monkeypatch.setenv(where, str(prefix))
    assert backend.find_torch() == found


def without_torch(backend, monkeypatch, tmp_path):
    backend.build_wheel(str(tmp_path))


def without_torch_in_the_named_folder(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDRL_TORCH_DIR", str(tmp_path))
    backend.find_torch()


def with_an_old_torch(backend, monkeypatch, tmp_path):
    old = make_torch(tmp_path / "old", "2.9.1+cpu")
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda scheme: str(old.parent))
    backend.build_editable(str(tmp_path))


def without_nvcc_of_pypi(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend.sys, "path", [str(tmp_path)])
    monkeypatch.setattr(backend, "_point_cmake_at_torch", lambda: None)
    backend.build_wheel(str(tmp_path), OF_PYPI)


@pytest.mark.parametrize(
    ("build", "said", "remedy"),
    [
        (without_torch, "expected an installed torch to compile against, found none", "torch>=2"),
        (without_torch_in_the_named_folder, "FUSEDRL_TORCH_DIR: expected", "unset it"),
        (with_an_old_torch, "expected torch>=2.10, found torch 2.9", "pip install 'torch>=2.10'"),
        (
            *(without_nvcc_of_pypi, "FUSEDRL_CUDA: expected the nvcc of PyPI's packages"),
            "pip install 'cuda-toolkit[cccl,nvcc]==13.0.*'",
        ),
    ],
)
def test_a_build_that_cannot_go_on_stops_in_one_line(
    backend, monkeypatch, tmp_path, build, said, remedy
):
    with pytest.raises(SystemExit) as refusal:
        build(backend, monkeypatch, tmp_path)
    message = str(refusal.value)
    assert "\n" not in message and said in message and remedy in message


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_only_what_is_missing_is_required(backend, monkeypatch, tmp_path, kind):
    requires = getattr(backend, f"get_requires_for_build_{kind}")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(backend.Path, "cwd", lambda: tmp_path)
    without = requires()
    monkeypatch.setenv("FUSEDRL_TORCH_DIR", str(make_torch(tmp_path)))
    assert without == [*requires(), "torch>=2.10"]
    for cuda in ("auto", "on", "off", "pypi"):
        more = set(requires({"cmake.define.FUSEDRL_CUDA": cuda})) - set(requires())
        assert more == ({"cuda-toolkit[cccl,nvcc]==13.0.*"} if cuda == "pypi" else set())


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_nvcc_of_pypi_compiles_where_there_is_another_too(backend, monkeypatch, tmp_path, kind):
    nvcc, other = tmp_path / "environment/nvidia/cu13/bin/nvcc", tmp_path / "other/nvcc"
    for path in (nvcc, other):
        path.parent.mkdir(parents=True)
        path.write_text("")
    monkeypatch.setenv("PATH", str(other.parent))
    monkeypatch.setenv("LIBRARY_PATH", "/before")
    monkeypatch.setattr(backend.sys, "path", [str(tmp_path), str(tmp_path / "environment")])
    monkeypatch.setattr(backend, "_point_cmake_at_torch", lambda: None)
    monkeypatch.setattr(backend, "_keep_paths_within", lambda *_: None)
    given = []
    monkeypatch.setattr(backend._skbuild, f"build_{kind}", lambda *a: given.append(a) or "a.whl")
    build = getattr(backend, f"build_{kind}")
    build("folder", OF_PYPI)
    assert given.pop()[1] == {
        "cmake.define.FUSEDRL_CUDA": "on",
        "cmake.define.FUSEDRL_CUDA_ARCHS": "80",
        "cmake.define.CMAKE_CUDA_COMPILER": str(nvcc),
    }
    libraries = nvcc.parents[1] / "lib"  # where nvcc does not look
    assert os.environ["LIBRARY_PATH"] == f"{libraries}{os.pathsep}/before"
    for settings in (None, {"cmake.define.FUSEDRL_CUDA": "on"}):
        build("folder", settings)
        assert given.pop()[1] == settings


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on PATH")
@pytest.mark.parametrize("value", ["pypi", "OFF", ""])
def test_cmake_refuses_a_value_that_it_does_not_know(value):
    """Or ``pypi`` past the backend would take whichever nvcc is on PATH."""
    command = ["cmake", f"-DFUSEDRL_CUDA={value}", "-P", str(ROOT / "cmake/cuda.cmake")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"FUSEDRL_CUDA: expected auto, on or off, got '{value}'" in " ".join(done.stderr.split())


def test_an_editable_install_has_no_path_beside_the_checkout(backend, monkeypatch, tmp_path):
    def build_editable(folder, *_):
        with zipfile.ZipFile(Path(folder) / "made.whl", "w") as wheel:
            wheel.writestr("made.pth", f"import made\n{ROOT / 'python'}\n{ROOT.parent}\n")
            wheel.writestr("made.py", "")
            wheel.writestr("made.dist-info/RECORD", "made.pth,x,1\nmade.py,y,0\nRECORD,,\n")
        return "made.whl"

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(backend, "_point_cmake_at_torch", lambda: None)
    monkeypatch.setattr(backend._skbuild, "build_editable", build_editable)
    with zipfile.ZipFile(tmp_path / backend.build_editable(str(tmp_path))) as wheel:
        path, record = wheel.read("made.pth"), wheel.read("made.dist-info/RECORD").decode()
    assert path.decode().splitlines() == ["import made", str(ROOT / "python")]
    digest = base64.urlsafe_b64encode(hashlib.sha256(path).digest()).rstrip(b"=").decode()
    assert record.splitlines() == [
        f"made.pth,sha256={digest},{len(path)}",
        "made.py,y,0",
        "RECORD,,",
    ]


@pytest.mark.heavy
def test_sdist_has_what_a_build_needs_and_nothing_else(backend, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / backend.build_sdist(str(tmp_path))) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert set(names) >= {
        *("CMakeLists.txt", "cmake/cuda.cmake", "csrc/ops.cpp", "setup_helpers/backend.py"),
        *("python/fusedrl/native.py", "python/fusedrl/py.typed", "examples/grpo.py"),
        *("pyproject.toml", "README.md", "LICENSE"),
    }
    assert {name.partition("/")[0] for name in names} <= {
        *("CMakeLists.txt", "cmake", "csrc", "setup_helpers", "python"),
        *("benchmarks", "examples"),
        *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"),
    }
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    assert not [name for name in names if name.startswith("benchmarks/results/")]
