"""Check an environment made for one package alone: `python tools/check_alone.py PACKAGE TOOLS...`.

It holds the package, what its dependencies lead to, and the test tools; nothing else. In it, each
module of the package can be imported, but for those that an optional dependency is for.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions

from check_imports import OPTIONAL

INSTALLERS = {"pip", "setuptools", "wheel"}


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(*requirements: str) -> set[str]:
    """The installed distributions that `requirements` lead to, extras left out."""
    found: set[str] = set()
    queue = list(requirements)
    while queue:
        requirement = queue.pop()
        name = canonical(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        if name in found or "extra ==" in requirement:
            continue
        try:
            queue += distribution(name).requires or []
        except PackageNotFoundError:  # for another platform or Python
            continue
        found.add(name)
    return found


def unexplained(package: str, *tools: str) -> set[str]:
    """Installed distributions that neither the package nor the tools lead to."""
    here = {canonical(d.metadata["Name"]) for d in distributions()}
    return here - closure(package, "ep-testing", *tools) - INSTALLERS


def import_all(package: str) -> int:
    """Import every module of a package; the count of those that could be."""
    module = importlib.import_module(package)
    names = [m.name for m in pkgutil.walk_packages(module.__path__, f"{package}.")]
    count = 1
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL.get(package, set()):
                raise
        else:
            count += 1
    return count


def main() -> None:
    """Check the running environment."""
    package, *tools = sys.argv[1:]
    if extra := unexplained(package, *tools):
        sys.exit(f"{package} is not alone here: {', '.join(sorted(extra))}")
    print(f"{package}: {import_all(package.replace('-', '_'))} modules imported")


if __name__ == "__main__":
    main()
