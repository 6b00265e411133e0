"""Under a lock that the training thread takes, loops that pass over something are functions apart.

Where a condition sends a loop back, Python 3.13 looks at signals at an instruction that the block
around it does not cover (https://github.com/python/cpython/issues/130279): Ctrl-C there leaves a
``with`` without its ``__exit__``, and whoever wants the lock next waits for ever.  Tracers meet
the same gap from 3.12 on (issue 148278).  A call is always covered.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from .sources import Source, package_sources

HOLDERS = re.compile("[lL]ock|_changed|_calls|ExitStack")  # what must not be left without its end
OTHER_FRAMES = (ast.FunctionDef, ast.Lambda, ast.GeneratorExp, ast.ClassDef)


def passing_loops(block: ast.AST) -> Iterator[int]:
    """Lines of loops in a block, run in its own frame, that may go on before their last line."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, OTHER_FRAMES):
            continue
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            if any(each.ifs for each in node.generators):
                yield node.lineno
        elif isinstance(node, (ast.For, ast.While)):
            turns = (ast.If, ast.Continue, ast.IfExp, ast.BoolOp)
            if any(isinstance(each, turns) for line in node.body for each in ast.walk(line)):
                yield node.lineno
        yield from passing_loops(node)


def code(nodes: Sequence[ast.AST]) -> str:
    return "\n".join(map(ast.unparse, nodes))


def under_locks(source: Source) -> list[int]:
    return [
        line
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.With) and HOLDERS.search(code(node.items)))
        or (isinstance(node, ast.Try) and ".release(" in code(node.finalbody))
        for statement in node.body
        for line in passing_loops(ast.Module([statement], []))
    ]


def test_an_interrupt_amid_a_loop_leaves_no_lock_taken() -> None:
    locks = 0
    for source in package_sources():
        locks += "with self._lock:" in source.text
        # Those of the I/O engine's dispatcher: its own thread, which gets no signals.
        if source.path != "io_engine/dispatch.py":
            assert not under_locks(source), source.path
    assert locks > 5


def test_such_a_loop_is_found() -> None:
    source = Source("made_up.py")
    source.__dict__["text"] = (
        "def f(self):\n with self._lock:\n  a = [b for b in self.c if b]\n  for d in a:\n"
        "   if d: d()\n  for e in a:\n   e()\n  list(b for b in a if b)\n"
        " try:\n  while self.g:\n   if self.h():\n    return\n finally:\n  self.lock.release()\n"
    )
    assert under_locks(source) == [3, 4, 10]
