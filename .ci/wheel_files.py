"""A wheel holds exactly the files of the packages that git tracks.

python3 .ci/wheel_files.py WHEEL    # in the root of a clone
"""

import subprocess
import sys
import zipfile

PACKAGES = ("ringspec", "nki_impl")


def main() -> None:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    listing = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], check=True, capture_output=True, text=True
    )
    expected = set(listing.stdout.split("\0")) - {""}
    for name in sorted(expected - found):
        print(f"missing from the wheel: {name}")
    for name in sorted(found - expected):
        print(f"in the wheel, but not in git: {name}")
    if found != expected:
        sys.exit(1)
    print(f"the wheel holds the {len(found)} files of {' and '.join(PACKAGES)}, and no other")


if __name__ == "__main__":
    main()
