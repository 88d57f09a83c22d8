"""`python -m tests.expected [NAME...]`: write down anew what every stage prints, for `git diff` to show."""

import sys

from tests.expected.pages import AS_WRITTEN, PAGES, path

assert AS_WRITTEN, "the pages are those of another torch or Python"
for name in sys.argv[1:] or PAGES:
    path(name).write_text(PAGES[name](), encoding="utf-8")
    print(path(name))
