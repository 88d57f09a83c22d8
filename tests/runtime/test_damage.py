"""2,000 entries of the store on disk that are damaged, or lie under another's key: none is found."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path

from minicompile.ops import cache
from minicompile.ops.cache import Cache
from minicompile.options import Options

KEYS, ROUNDS = [f"{i:032}" for i in range(5)], 2000


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    lambda content, draw: flip(flip(flip(content, draw), draw), draw),
    lambda content, draw: content[: draw.randrange(len(content))],
    lambda content, draw: content + draw.randbytes(draw.randint(1, 99)),
    lambda content, draw: draw.randbytes(len(content)),
]


def test_nothing_damaged_or_swapped_is_found(tmp_path: Path) -> None:
    draw = random.Random(0)
    store = Cache(Options(cache_dir=str(tmp_path)), "graphs")
    contents = {key: draw.randbytes(4000) for key in KEYS}
    for key, content in contents.items():
        store.put(key, content)
    files = {key: tmp_path / "graphs" / f"{key}.json" for key in KEYS}
    whole = {key: file.read_bytes() for key, file in files.items()}
    for _ in range(ROUNDS):
        key = draw.choice(KEYS)
        if draw.random() < 0.3:  # another entry, whole, under this one's key
            damaged = whole[draw.choice([other for other in KEYS if other != key])]
        else:
            damaged = draw.choice(DAMAGES)(whole[key], draw)
        if damaged != whole[key]:
            files[key].write_bytes(damaged)
            assert store.get(key) is None and store.file(key) is None
            files[key].write_bytes(whole[key])
    assert {key: store.get(key) for key in KEYS} == contents


def test_nothing_unpickles() -> None:
    """The formats that run code when they are read."""
    package = Path(cache.__file__).parents[1]
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            if isinstance(node, ast.Import | ast.ImportFrom):
                names.append(getattr(node, "module", None) or "")
                assert not {"pickle", "marshal", "shelve", "dill", "joblib"} & set(names), file
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "np.load"), file
