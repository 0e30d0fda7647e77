"""The radix tree: splits at page borders, locks along the path, leaves by age, cost of a walk."""

from __future__ import annotations

import pytest

from kvcache.radix_tree import Node, PageKeys, RadixTree


class CountingList(list[int]):
    """Token ids that count how many of them were read."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def grow(tree: RadixTree, token_ids: list[int], pages: list[int]) -> Node:
    """Insert what is missing of `token_ids`; `pages` are those of the missing part."""
    keys = PageKeys(token_ids, tree.page_size)
    node, found = tree.walk(keys)
    return tree.append(node, keys.slice(len(found), keys.num_pages), pages)


def find(tree: RadixTree, token_ids: list[int]) -> tuple[Node, list[int]]:
    return tree.walk(PageKeys(token_ids, tree.page_size))


def test_an_empty_tree_matches_nothing() -> None:
    tree = RadixTree(4)
    assert find(tree, [1, 2, 3, 4]) == (tree.root, [])
    assert find(tree, []) == (tree.root, [])
    assert tree.oldest_leaf() is None
    tree.check()


def test_only_full_pages_match() -> None:
    tree = RadixTree(2)
    grow(tree, [1, 2, 3, 4], [7, 8])
    assert find(tree, [1])[1] == []
    assert find(tree, [1, 2, 3])[1] == [7]
    assert find(tree, [1, 2, 3, 4, 5])[1] == [7, 8]
    assert find(tree, [1, 9, 3, 4])[1] == []
    tree.check()


def test_prompts_that_part_share_the_pages_before() -> None:
    tree = RadixTree(2)
    grow(tree, [1, 2, 3, 4, 5, 6], [1, 2, 3])
    grow(tree, [1, 2, 3, 4, 7, 8], [4])
    assert (tree.num_pages, tree.num_nodes) == (4, 3)
    assert find(tree, [1, 2, 3, 4, 5, 6])[1] == [1, 2, 3]
    assert find(tree, [1, 2, 3, 4, 7, 8])[1] == [1, 2, 4]
    tree.check()


def test_tokens_that_differ_inside_a_page_share_nothing_of_it() -> None:
    tree = RadixTree(4)
    grow(tree, [1, 2, 3, 4], [1])
    grow(tree, [1, 2, 3, 5], [2])
    assert find(tree, [1, 2, 3, 4])[1] == [1]
    assert find(tree, [1, 2, 3, 5])[1] == [2]
    assert tree.num_nodes == 2


def test_a_split_keeps_locks_and_whoever_locked_can_unlock() -> None:
    tree = RadixTree(1)
    lower = grow(tree, [1, 2, 3, 4], [1, 2, 3, 4])
    tree.lock(lower)
    upper, pages = find(tree, [1, 2])
    assert pages == [1, 2]
    assert upper is not lower and lower.parent is upper
    assert (upper.locks, lower.locks, tree.evictable) == (1, 1, [0])
    tree.lock(upper)
    tree.unlock(lower)
    assert (upper.locks, lower.locks, tree.evictable) == (1, 0, [2])
    tree.unlock(upper)
    assert tree.evictable == [4]
    tree.check()


def test_the_leaf_used_least_recently_comes_first() -> None:
    tree = RadixTree(1)
    for token in (1, 2, 3):
        grow(tree, [token], [token])
    find(tree, [1])
    order = []
    while (leaf := tree.oldest_leaf()) is not None:
        order += tree.trim(leaf, 1)
        tree.check()
    assert order == [2, 3, 1]
    assert (tree.num_pages, tree.num_nodes, tree.evictable) == (0, 0, [0])


def test_a_parent_is_dropped_after_its_children_and_by_its_own_age() -> None:
    tree = RadixTree(1)
    grow(tree, [1, 2], [1, 2])
    grow(tree, [1, 3], [3])
    grow(tree, [9], [9])
    find(tree, [1, 3])
    order = []
    while (leaf := tree.oldest_leaf()) is not None:
        order += tree.trim(leaf, len(leaf.pages))
    assert order == [2, 9, 3, 1]


def test_locked_leaves_are_passed_over_and_come_back() -> None:
    tree = RadixTree(1)
    old = grow(tree, [1], [1])
    new = grow(tree, [2], [2])
    tree.lock(old)
    assert tree.oldest_leaf() is new
    tree.lock(new)
    assert tree.oldest_leaf() is None
    tree.unlock(new)
    tree.unlock(old)
    assert tree.oldest_leaf() is old
    tree.check()


def test_trimming_takes_pages_from_the_end() -> None:
    tree = RadixTree(1, num_lanes=2)
    leaf = grow(tree, [1, 2, 3], [1, 2, 3])
    assert tree.evictable == [2, 1]
    assert tree.trim(leaf, 2) == [2, 3]
    assert find(tree, [1, 2, 3])[1] == [1]
    assert tree.evictable == [1, 0]
    tree.check()
    grow(tree, [1, 5], [5])
    with pytest.raises(RuntimeError, match="unlocked leaf"):
        tree.trim(leaf, 1)


def test_trimming_more_than_there_is_is_refused() -> None:
    tree = RadixTree(1)
    leaf = grow(tree, [1, 2], [1, 2])
    for num_pages in (0, 3):
        with pytest.raises(ValueError, match=rf"num_pages must be in \[1, 2\], got {num_pages}"):
            tree.trim(leaf, num_pages)


def test_locks_are_balanced_and_never_on_what_is_gone() -> None:
    tree = RadixTree(1)
    leaf = grow(tree, [1], [1])
    with pytest.raises(RuntimeError, match="not locked"):
        tree.unlock(leaf)
    tree.trim(leaf, 1)
    with pytest.raises(RuntimeError, match="evicted"):
        tree.lock(leaf)
    tree.lock(tree.root)
    tree.unlock(tree.root)
    tree.check()


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_that_no_key_can_hold_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"got {token}"):
        find(RadixTree(2), [5, token])


def test_a_walk_reads_what_it_matches_not_the_whole_prompt() -> None:
    tree = RadixTree(4)
    grow(tree, list(range(4000)), list(range(1, 1001)))
    miss = CountingList([*range(5000, 9000)])
    assert find(tree, miss)[1] == []
    assert miss.num_read <= 8 * 4
    half = CountingList([*range(400), *range(5000, 9000)])
    assert len(find(tree, half)[1]) == 100
    assert half.num_read <= 4 * 400


def test_the_heap_does_not_grow_with_the_number_of_uses() -> None:
    tree = RadixTree(1)
    for token in range(4):
        grow(tree, [token], [token + 1])
    for use in range(200):
        node, _ = find(tree, [use % 4])
        tree.lock(node)
        tree.unlock(node)
    tree.check()  # one entry a leaf
    leaf = tree.oldest_leaf()
    assert leaf is not None and leaf.pages == [1]


def test_a_long_run_is_compared_to_its_first_different_page() -> None:
    token_ids = list(range(300))
    for where in (1, 2, 3, 7, 8, 9, 31, 32, 33, 254, 299):
        tree = RadixTree(1)
        grow(tree, token_ids, list(range(1, 301)))
        other = [*token_ids[:where], 999, *token_ids[where + 1 :]]
        assert find(tree, other)[1] == list(range(1, where + 1))
        assert tree.num_nodes == 2  # one cut, at that page
        tree.check()
