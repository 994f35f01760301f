"""Put the packages of one checkout on the path of asv's environment: `python install.py BUILD_DIR`.

They are pure Python, so a `.pth` file is an installation that takes no time, and it works for a commit
that has other packages than today's.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> None:
    """Write the file."""
    build = Path(sys.argv[1])
    sources = sorted([*build.glob("packages/*/src"), *build.glob("tools/*/src")])
    if not sources:
        sys.exit(f"{build} holds no packages/*/src")
    file = Path(sysconfig.get_path("purelib")) / "asv_packages.pth"
    file.write_text("".join(f"{path}\n" for path in sources), encoding="utf-8")


if __name__ == "__main__":
    main()
