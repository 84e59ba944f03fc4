"""The catalogue of places (tests/places): each launcher's environment, and machines and folders other than a developer's own."""

from __future__ import annotations

import pytest
from places.launchers import LAUNCHED

from fsbarrier.cli.start import ranks
from fsbarrier.errors import UsageError


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_node_takes_its_rank_and_the_number_of_nodes_from_each_launcher(name: str) -> None:
    node = LAUNCHED[name]
    if node.expected is None:
        with pytest.raises(UsageError) as caught:
            rank = ranks.node_rank(master=False, worker=None, environ=node.environ)
            ranks.check_count(rank, node.environ, dry_run=False)
        assert node.says in str(caught.value)
        return
    rank = ranks.node_rank(master=False, worker=None, environ=node.environ)
    count = ranks.count_nodes(rank, node.environ)
    assert (rank and rank.value, count and count.value) == node.expected
