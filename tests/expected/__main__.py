"""`python -m tests.expected [NAME...]`: write down anew what every stage prints, for `git diff` to show."""

import sys

from tests.expected.pages import PAGES, path

for name in sys.argv[1:] or PAGES:
    path(name).write_text(PAGES[name](), encoding="utf-8")
    print(path(name))
