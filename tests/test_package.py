"""The package as a whole: which way its imports point, how much a step is to read, what its wheel needs."""

import ast
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement

from command_line import COMMANDS, registered

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "retrograde"
LAYERS = ["errors", "extras", "arithmetic", "reverse", "memory", "theory", "nets", "convert", "integrations", "cli"]
"""Each may import from those before it."""
OUTSIDE = {"arithmetic": {"torch", "triton"}, "reverse": {"torch"}, "memory": {"torch"}}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, relative ones resolved."""
    package = ("retrograde", *path.relative_to(SOURCE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {module} if node.module else {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer: str) -> None:
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    for path in (SOURCE / layer).rglob("*.py"):
        for name in imports(path):
            top, *rest = name.split(".")
            if top == "retrograde" and rest:
                assert rest[0] in allowed, f"{path.name} of {layer}/ imports {name}"
            elif top != "retrograde" and layer in OUTSIDE:
                assert top in OUTSIDE[layer] | set(sys.stdlib_module_names), f"{path.name} of {layer}/ imports {name}"


def test_readme_snippets_run() -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def test_no_machine_in_tracked_files() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"https?://[a-z0-9.-]*(pypi|pythonhosted|npmjs|debian)\.|/(opt|root|work)/")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".c", ""} and path.exists() and path != Path(__file__):
            assert not pattern.search(path.read_text(errors="ignore")), name


def link_torch(site: Path) -> None:
    """Torch, and what it needs itself, in another environment, without fetching it again."""
    left, seen = ["torch"], set[str]()
    while left:
        seen.add(name := left.pop())
        found = metadata.distribution(name)
        needs = map(Requirement, found.requires or ())
        left += [r.name for r in needs if r.name not in seen and (not r.marker or r.marker.evaluate({"extra": ""}))]
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))


@pytest.mark.slow
def test_the_wheel_needs_torch_alone(tmp_path: Path) -> None:
    backend = ["--no-isolation"] if find_spec("hatchling") else []  # else it is fetched
    build = [sys.executable, "-m", "build", *backend, "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    (site,) = (tmp_path / "clean" / "lib").glob("*/site-packages")
    link_torch(site)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, env=environment)  # fails where more is needed
    code = (
        "import importlib.metadata as m, torch, retrograde as rg; net = rg.MomentumNet([torch.nn.Linear(4, 4)] * 8);"
        "net(torch.ones(2, 4)).sum().backward(); print(rg.__version__, rg.__file__, m.version('retrograde'))"
    )
    done = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "site-packages" in done.stdout
    files = list((tmp_path / "clean").rglob("retrograde/py.typed"))
    assert files, "py.typed is missing from the wheel"
    with zipfile.ZipFile(wheel) as held:
        tops = {name.split("/")[0] for name in held.namelist()}
    assert tops == {"retrograde", f"retrograde-{metadata.version('retrograde')}.dist-info"}, "the wheel holds more"
    assert list((tmp_path / "clean").rglob("retrograde/arithmetic/cpu.c")), "cpu.c is missing from the wheel"
    cli = subprocess.run(
        [str(tmp_path / "clean" / "bin" / "retrograde")], capture_output=True, text=True, env=environment
    )
    assert "retrograde[cli]" in cli.stderr + cli.stdout


def test_the_experiments_register_the_commands_that_they_name() -> None:
    assert set(COMMANDS) == {"train", "reproduce", "report", "bench"}
    for name, value in COMMANDS.items():
        app = typer.Typer()
        EntryPoint(name, value, "retrograde.commands").load()(app)
        assert registered(app) == (["train", "compare"] if name == "train" else [name])


def test_the_experiments_use_private_names_of_the_library_in_one_file_only() -> None:
    """Public are the names of `retrograde`, `retrograde.nets`, `retrograde.theory`, and what imports optional packages."""
    private = re.compile(r"(?:from|import) retrograde\.(?!nets\b|theory\b|extras\b)(\w+)")
    for path in (ROOT / "experiments").rglob("*.py"):
        if path.name != "private.py":
            assert not private.findall(path.read_text()), path


def test_importing_it_does_not_import_the_compiler() -> None:
    """torch._dynamo takes ten times as long to import as all of this package."""
    code = "import sys, torch; before = set(sys.modules); import retrograde; sys.exit('torch._dynamo' in set(sys.modules) - before)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
