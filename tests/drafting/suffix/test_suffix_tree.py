"""The suffix tree against a dictionary of all pieces of the texts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.suffix.texts import LiveText
from outrider.drafting.suffix.tree import ROOT, SuffixTree
from tests.drafting.suffix.suffix_oracle import PieceCounts

texts_of_few_tokens = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=5)
depths = st.integers(2, 6)


def insert_all(tree: SuffixTree, text: array[int]) -> None:
    for start in range(len(text)):
        tree.insert(text, start)


def tree_over(texts: Sequence[Sequence[int]], max_depth: int) -> SuffixTree:
    tree = SuffixTree(max_depth)
    for text in texts:
        insert_all(tree, array("i", text))
    return tree


def check_counts(tree: SuffixTree, texts: Sequence[Sequence[int]]) -> None:
    """Every piece is found with what follows it, nothing else is found, and no node is there for nothing."""
    pieces = PieceCounts(texts, tree.max_depth)
    for piece in pieces.counts:
        position = tree.find(array("i", piece))
        assert position is not None
        assert position.depth == len(piece)
        followers = pieces.followers(piece)
        found = tree.followers(position, 0.0)
        assert tree.num_followed(position) == sum(followers.values())
        assert {follower.token_id: follower.share for follower in found} == {
            token: count / sum(followers.values()) for token, count in followers.items()
        }
        for follower in found:
            assert tree.find(array("i", (*piece, follower.token_id))) == follower.position
        for token in range(4):
            expected = len(piece) < tree.max_depth and token in followers
            assert (tree.find(array("i", (*piece, token))) is not None) == expected
    nodes = list(tree.walk())
    assert len(nodes) == tree.num_nodes - 1 == len({string for string, _count, _followed in nodes})
    assert len(nodes) <= 2 * sum(len(text) for text in texts)
    for string, count, followed in nodes:
        assert (count, followed) == (pieces.counts[string], sum(pieces.followers(string).values()))
        assert followed < count or len(pieces.followers(string)) > 1, "no window ends here and nothing branches"


def check_order(tree: SuffixTree, texts: Sequence[Sequence[int]]) -> None:
    """The commonest follower comes first, of several the one last seen; the others by their shares."""
    pieces = PieceCounts(texts, tree.max_depth)
    for piece in pieces.counts:
        position = tree.find(array("i", piece))
        assert position is not None
        found = tree.followers(position, 0.0)
        followers = pieces.followers(piece)
        best = max(followers, key=lambda token: (followers[token], pieces.last_seen[(*piece, token)]), default=None)
        assert [follower.token_id for follower in found[:1]] == ([] if best is None else [best])
        assert tree.best_follower(position) == (found[0] if found else None)
        shares = [follower.share for follower in found]
        assert shares == sorted(shares, reverse=True)
        for least in (0.2, 0.5, 0.9, 1.0):
            assert tree.followers(position, least) == [follower for follower in found if follower.share >= least]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts_of_few_tokens, depths)
def test_whole_texts(texts: list[list[int]], max_depth: int) -> None:
    tree = tree_over(texts, max_depth)
    check_counts(tree, texts)
    check_order(tree, texts)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=6), depths)
def test_a_text_that_grows(reports: list[list[int]], max_depth: int) -> None:
    """Token by token and in long pieces; after each the tree is that of the text so far."""
    live = LiveText(max_depth)
    text: list[int] = []
    for tokens in reports:
        live.extend(tokens)
        text += tokens
        check_counts(live.tree, [text])
        check_order(live.tree, [text])
        longest = min(len(text), max_depth - 1)
        assert live.suffixes() == [live.tree.find(live.token_ids[-length:]) for length in range(longest, 0, -1)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts_of_few_tokens, depths, st.data())
def test_texts_that_are_removed_leave_nothing(texts: list[list[int]], max_depth: int, data: st.DataObject) -> None:
    """In any order, with other texts coming in between: the tree is that of the texts which are left."""
    tree = SuffixTree(max_depth)
    arrays = [array("i", text) for text in texts]
    present: list[int] = []
    for index in range(len(texts)):
        insert_all(tree, arrays[index])
        present.append(index)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(present))
            present.remove(gone)
            for start in range(len(arrays[gone])):
                tree.remove(arrays[gone], start)
            for position in range(len(arrays[gone])):
                arrays[gone][position] = -7  # an edge that still read from it would show
        kept = [texts[kept_index] for kept_index in present]
        check_counts(tree, kept)
        assert tree.num_nodes == tree_over(kept, max_depth).num_nodes
    for index in present:
        for start in range(len(arrays[index])):
            tree.remove(arrays[index], start)
    assert tree.num_nodes == 1
    assert list(tree.walk()) == []


def test_a_loop_costs_no_more_nodes_than_a_text_without_one() -> None:
    live = LiveText(24)
    for _ in range(2_000):
        live.extend([1, 2, 3])
    assert live.tree.num_nodes <= 3 * 24 + 1
    varied = tree_over([list(range(6_000))], 24)
    assert varied.num_nodes == 6_001, "one leaf for each position and the root"


def test_a_text_grows_on_where_another_was_removed() -> None:
    """Its window stood in the other's edge, which has been copied since."""
    tree = SuffixTree(6)
    gone, grown = array("i", [1, 2, 3]), array("i", [1, 2])
    insert_all(tree, gone)
    ends = [tree.insert(grown, start).node for start in (0, 1)]
    for start in range(len(gone)):
        tree.remove(gone, start)
    check_counts(tree, [[1, 2]])
    grown.append(4)
    for node in (*ends, ROOT):
        tree.extend(node, grown, 2)
    check_counts(tree, [[1, 2, 4]])
