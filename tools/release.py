"""Build a release, check it, and try it in empty environments.

``python tools/release.py [--url URL] /usr/bin/python3.10 /usr/bin/python3.13`` needs uv. It makes
``dist/`` anew. URL is where the repository is published: links of README.md become absolute, as an
index page needs them, and the metadata names the addresses. For each interpreter the wheel is
installed with the lowest and the newest torch and TorchRL that it allows. In each environment the
README's example prints what it should, and a run is trained, resumed and inspected in an empty
folder. A table in Markdown tells how it went.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = re.compile(r'^ +"((?:torch|torchrl|tensordict)>=[^"]+)"', re.MULTILINE)
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s]+)")
NOT_RELEASED = (".git", ".venv*", "dist", "site", "runs", "build", "*.egg-info", ".*_cache")
VERSIONS = """
import platform, numpy, tensordict, torch, torchrl
modules = torch, torchrl, tensordict, numpy
print(platform.python_version(), *(m.__version__.partition("+")[0] for m in modules), sep=" | ")
"""


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Run a command; return what it printed.

    Raises:
        subprocess.CalledProcessError: it failed; its output stands on the terminal.
    """
    environment = {**os.environ, "RL_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def with_absolute_links(text: str, url: str) -> str:
    """Return a page of Markdown whose links and images work on another site.

    Args:
        text: the page, with links relative to the root of the repository.
        url: address of the repository, below which files are found.
    """
    where = url.rstrip("/")

    def absolute(match: re.Match[str]) -> str:
        form = "raw" if match[2].endswith((".png", ".svg")) else "blob"
        return f"{match[1]}{where}/{form}/main/{match[2]}"

    return LINK.sub(absolute, text)


def with_urls(pyproject: str, url: str) -> str:
    """Return the text of pyproject.toml with the addresses of the project."""
    where = url.rstrip("/")
    pages = {"Source": "", "Documentation": "/blob/main/docs/index.md"}
    pages |= {"Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
    lines = [f'{name} = "{where}{page}"' for name, page in pages.items()]
    return pyproject.replace(
        "[project.scripts]", "\n".join(["[project.urls]", *lines, "", "[project.scripts]"])
    )


def build(url: str | None = None) -> Path:
    """Make sdist and wheel, and check how a package index will read them; return the wheel."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "gfn_rb"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_RELEASED))
        if url is not None:
            for name, change in (("README.md", with_absolute_links), ("pyproject.toml", with_urls)):
                file = source / name
                file.write_text(change(file.read_text(), url))
        run("uv", "build", "--quiet", "--out-dir", ROOT / "dist", folder=source)
    made = sorted((ROOT / "dist").glob("gfn_rb-*"))
    print(run("uv", "tool", "run", "twine", "check", "--strict", *made), file=sys.stderr)
    return next(path for path in made if path.suffix == ".whl")


def try_out(interpreter: str, requirements: list[str]) -> str:
    """Install into an empty environment and use what is there; return its versions."""
    code, output = EXAMPLE.findall((ROOT / "README.md").read_text())[0]
    with tempfile.TemporaryDirectory(dir=ROOT / "dist") as name:
        folder = Path(name)
        run("uv", "venv", "--quiet", "--python", interpreter, folder / "venv")
        python = folder / "venv" / "bin" / "python"
        run("uv", "pip", "install", "--quiet", "--python", python, *requirements)
        printed = run(python, "-c", code, folder=folder)
        assert printed == output, f"the README's example printed {printed!r}, expected {output!r}"
        command = python.with_name("gfn-rb")
        run(command, "train", "tfbind8", "--steps", "20", "--out", "run", folder=folder)
        run(command, "resume", "run", "--steps", "30", folder=folder)
        run(command, "inspect", "run", folder=folder)
        return run(python, "-c", VERSIONS, folder=folder).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and check, and print a row for each interpreter and set of versions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="address of the published repository")
    parser.add_argument("interpreters", nargs="*", metavar="PYTHON")
    options = parser.parse_args(arguments)
    wheel = build(options.url)
    allowed = ALLOWED.findall((ROOT / "pyproject.toml").read_text())
    lowest = [re.sub(r">=([^,]+).*", r"==\1", each) for each in allowed]
    print("| Python | torch | torchrl | tensordict | numpy |\n| --- | --- | --- | --- | --- |")
    for interpreter in options.interpreters:
        for versions in (lowest, allowed):
            print(f"| {try_out(interpreter, [f'{wheel}[train]', *versions])} |", flush=True)


if __name__ == "__main__":
    main()
