"""The clocks that find missing waits, against the definition: reachability in a graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.movement.accelerators.base import OverlapError
from overspill.movement.accelerators.ordering import Clock, Ordering

STREAMS = ("compute", "copy_in", "copy_out")


@dataclass
class Node:
    stream: str
    start: int
    stop: int
    writes: bool
    before: set[int] = field(default_factory=set)


class Graph:
    """Every access ever made, each with the set of those before it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.last: dict[str, int] = {}

    def allows(self, node: Node) -> bool:
        return all(
            index in node.before
            for index, other in enumerate(self.nodes)
            if other.start < node.stop and node.start < other.stop and (other.writes or node.writes)
        )

    def node(self, stream: str, start: int, stop: int, writes: bool, after: list[int]) -> Node:
        node = Node(stream, start, stop, writes)
        for index in [*after, *([self.last[stream]] if stream in self.last else [])]:
            node.before |= {index} | self.nodes[index].before
        return node

    def add(self, node: Node) -> None:
        self.last[node.stream] = len(self.nodes)
        self.nodes.append(node)


ACCESSES = st.lists(
    st.tuples(
        st.sampled_from(STREAMS),
        st.integers(0, 7),
        st.integers(1, 5),
        st.booleans(),
        st.lists(st.integers(0, 30), max_size=3),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(ACCESSES)
def test_clocks_agree_with_reachability(
    accesses: list[tuple[str, int, int, bool, list[int]]],
) -> None:
    graph, ordering, clocks = Graph(), Ordering(), list[Clock]()
    for stream, start, nbytes, writes, waits in accesses:
        after = [index for index in waits if index < len(clocks)]
        node = graph.node(stream, start, start + nbytes, writes, after)
        try:
            clock = ordering.access(
                stream, start, nbytes, writes=writes, after=[clocks[index] for index in after]
            )
        except OverlapError:
            assert not graph.allows(node)
            continue
        assert graph.allows(node)
        clocks.append(clock)
        graph.add(node)


def test_following_orders_what_comes_later() -> None:
    ordering = Ordering()
    written = ordering.access("copy_in", 0, 10, writes=True, after=[])
    ordering.follow("compute", [written])
    ordering.access("compute", 5, 1, writes=True, after=[])
    assert ordering.clock("compute") == {"copy_in": 1, "compute": 1}
    assert ordering.everything() == {"copy_in": 1, "compute": 1}
