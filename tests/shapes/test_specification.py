"""The specification of symbolic sizes: torch computes shapes with them, and what was assumed becomes a guard.

What holds for every size from 2 on is answered without one; any other question is answered for the size at
hand, once, and the answer kept as a condition. Shapes and strides computed that way are eager's at every size
that the conditions allow. `test_simplify.py` has the forms that indices take, tests/fuzz/test_sizes.py random
programs that are called at other sizes.
"""

from __future__ import annotations

import pytest
import sympy
import torch

from minicompile import compat
from minicompile.ops.dtypes import tensor_text
from minicompile.shapes.env import ShapeEnv
from minicompile.shapes.expr import FloorDiv, ModularIndexing


@pytest.fixture
def env():
    return ShapeEnv()


def size(env, hint=5):
    return env.create_symbol(hint, f"size {hint}")


def test_a_symbol_remembers_hint_and_source(env):
    s = size(env, 5)
    (symbol,) = env.symbols
    assert s.node.expr is symbol and env.hints == {symbol: 5} and env.symbols == {symbol: "size 5"}
    assert symbol == sympy.Symbol("s0", integer=True, positive=True)


def test_zero_and_one_are_specialised(env):
    for hint in (0, 1):
        with pytest.raises(ValueError, match="specialised"):
            env.create_symbol(hint, None)


def broken_guards(env, sizes):
    """The guards that don't hold for other sizes."""
    return [f.condition for f in env.guards if f.condition.xreplace(sizes) != sympy.true]


def test_what_holds_for_all_sizes_needs_no_guard(env):
    s = size(env)
    assert s != 1 and s > 1 and s * 4 != s and 2 * s > s and s + 1 >= 3 and not s < 2
    assert (s * 16) // 16 == s and (s * 12) % 4 == 0
    assert env.guards == []


def test_other_questions_are_answered_for_the_sizes_at_hand_once(env):
    s, t = size(env, 5), size(env, 7)
    assert s < t and s < t and s != 6 and int(t) == 7
    assert len(env.guards) == 3
    a, b = env.symbols
    assert broken_guards(env, {a: 4, b: 7}) == []
    assert broken_guards(env, {a: 4, b: 8}) == [sympy.Eq(b, 7)]
    assert broken_guards(env, {a: 8, b: 7}) != []


def test_an_equation_answers_later_questions(env):
    s, t = size(env, 5), size(env, 5)
    assert s == t
    assert 2 * s == t * 2 and s + t == 2 * t
    assert len(env.guards) == 1


def test_floor_division():
    s = sympy.Symbol("s", integer=True, positive=True)
    assert FloorDiv(sympy.Integer(-7), sympy.Integer(2)) == -4
    assert FloorDiv(6 * s + 4, 2) == 3 * s + 2
    assert FloorDiv(s, 2).xreplace({s: sympy.Integer(7)}) == 3


def test_a_remainder_by_a_larger_size_is_the_size_itself(env):
    s = size(env, 5)
    assert s % (8 * s) != 0 and s // (8 * s) == 0 and s % (8 * s) == s
    assert env.guards == []
    (symbol,) = env.symbols
    assert ModularIndexing(symbol, sympy.Integer(1), 8 * symbol) == symbol
    assert ModularIndexing(symbol, sympy.Integer(2), 8 * symbol) == FloorDiv(symbol, 2)
    assert isinstance(ModularIndexing(9 * symbol, sympy.Integer(1), 8 * symbol), ModularIndexing)
    assert isinstance(ModularIndexing(symbol - 3, sympy.Integer(1), symbol), ModularIndexing)


SHAPES = {
    "view": lambda x: x.view(-1, 2, 3).transpose(0, 1).reshape(2, -1),
    "matmul": lambda x: x @ x.t(),
    "cat": lambda x: torch.cat([x, x, x[:, :2]], 1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 4, -1),
    "repeat": lambda x: x.repeat(2, 3),
    "conv": lambda x: torch.nn.functional.conv1d(x.unsqueeze(0), x.new_ones(2, x.shape[0], 3)),
    "chunk": lambda x: torch.stack(x.chunk(2, 1)),
    "permuted_norm": lambda x: torch.nn.functional.layer_norm(x.t().contiguous(), (x.shape[0],)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_strides_computed_with_symbols_are_eagers(name):
    """The expression, evaluated at every size that the guards allow, is the size eager gives."""
    env = ShapeEnv()
    mode = compat.fake_mode(symbolic=True)
    s = size(env, 7)
    with mode:
        fake = SHAPES[name](torch.empty(s, 6))
    (symbol,) = env.symbols
    checked = 0
    for actual in (2, 3, 4, 7, 12):
        if not broken_guards(env, {symbol: actual}):
            real = SHAPES[name](torch.ones(actual, 6))
            values = [*fake.shape, *fake.stride()]
            numbers = [
                v.node.expr.xreplace({symbol: actual}) if isinstance(v, torch.SymInt) else v
                for v in values
            ]
            assert numbers == [*real.shape, *real.stride()]
            checked += 1
    assert checked >= 1


def test_the_environment_prints_its_symbols_and_guards(env):
    s = env.create_symbol(5, "n")
    assert s < 9
    assert str(env).splitlines()[1:] == [
        "  s0 is n, 2 to 8",
        "  guard n < 9  # an operator asked for it while shapes were computed",
    ]


def test_an_equation_gives_a_term_by_the_others_if_it_can(env):
    s, t, u = size(env, 5), size(env, 8), size(env, 7)
    assert s * t == 8 * s and (u + 1) // 2 == 4
    assert t.node.expr == 8 and (s * t).node.expr == 8 * s.node.expr
    assert (3 * ((u + 1) // 2)).node.expr == 12 and u.node.expr.is_Symbol
    assert s * u == 35 and s.node.expr.is_Symbol  # nothing to solve for: a guard all the same
    assert len(env.guards) == 3 and s * u == 35


def test_a_general_program_assumes_nothing_about_gaps_in_memory(env):
    mode = compat.fake_mode(symbolic=True)
    s = size(env, 5)
    assert env.guards == []
    with mode:
        part = torch.empty_strided((s, s), (8, 1))
        assert tensor_text(part) == "f32[s0, s0; 8, 1]"
        assert tensor_text(part.new_empty_strided((s, s), (s, 1))) == "f32[s0, s0]"
        assert env.guards == []  # printing assumes nothing either
        env.general = True
        (~part.bool()).sum()
        assert env.guards == []
    env.general = False
    with compat.fake_mode(symbolic=True):  # the other one need not compute the sum again
        (~torch.empty_strided((s, s), (8, 1)).bool()).sum()
    assert [fact.condition for fact in env.guards] == [sympy.Ne(s.node.expr, 8)]
