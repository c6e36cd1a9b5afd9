"""The prefix cache: exact, by tenant, and never of a block that is not filled."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stopway_core.ledger import BLOCKS, CACHE, REQUEST, Ledger
from stopway_core.prefix import PrefixCache

SIZE = 2


def fill(cache: PrefixCache, ledger: Ledger, rid: int, tokens: list[int], salt: str = "") -> None:
    """What a request does: share what is cached, compute the rest, seal and cache it, end."""
    shared, entries = cache.match(salt, tokens, len(tokens))
    entry = entries[-1]
    if shared:
        ledger.blocks.share((REQUEST, rid), shared)
    wanted = len(tokens) // SIZE - len(shared)
    if wanted > ledger.blocks.free:
        cache.evict(wanted - ledger.blocks.free)
    for index, block in enumerate(ledger.blocks.acquire((REQUEST, rid), wanted), len(shared)):
        ledger.blocks.seal(block)
        entry = cache.insert(entry, tuple(tokens[index * SIZE : (index + 1) * SIZE]), block)
    ledger.drop((REQUEST, rid))


def test_a_match_is_whole_blocks_within_the_limit() -> None:
    ledger = Ledger({BLOCKS: 8})
    cache = PrefixCache(ledger, SIZE)
    fill(cache, ledger, 1, [1, 2, 3, 4, 5, 6])
    assert [len(cache.match("", [1, 2, 3, 4, 5, 6], n)[0]) for n in range(7)] == [
        0, 0, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert len(cache.match("", [1, 2, 9, 4, 5, 6], 6)[0]) == 1
    assert cache.match("", [3, 4], 2)[0] == []  # the same tokens after another prefix


def test_tenants_share_nothing() -> None:
    ledger = Ledger({BLOCKS: 8})
    cache = PrefixCache(ledger, SIZE)
    fill(cache, ledger, 1, [1, 2, 3, 4], salt="a")
    assert cache.match("b", [1, 2, 3, 4], 4)[0] == []
    assert len(cache.match("a", [1, 2, 3, 4], 4)[0]) == 2


def test_the_same_tokens_are_cached_once_and_the_second_block_comes_back() -> None:
    ledger = Ledger({BLOCKS: 4})
    cache = PrefixCache(ledger, SIZE)
    pool = ledger.blocks
    a, b = pool.acquire((REQUEST, 1), 1) + pool.acquire((REQUEST, 2), 1)
    for block in (a, b):
        pool.seal(block)
    root = cache.root("")
    assert cache.insert(root, (1, 2), a) == cache.insert(root, (1, 2), b)
    ledger.drop((REQUEST, 1))
    ledger.drop((REQUEST, 2))
    assert (pool.free, pool.idle, len(cache)) == (3, 1, 1)


def test_an_evicted_block_is_not_found_nor_what_stood_behind_it() -> None:
    ledger = Ledger({BLOCKS: 4})
    cache = PrefixCache(ledger, SIZE)
    fill(cache, ledger, 1, [1, 2, 3, 4])
    cache.evict(2)
    assert cache.match("", [1, 2, 3, 4], 4)[0] == [] and len(cache) == 0
    fill(cache, ledger, 2, [1, 2])  # the head alone is back: the old tail must stay unreachable
    assert len(cache.match("", [1, 2, 3, 4], 4)[0]) == 1
    assert ledger.blocks.free == 3


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), max_size=12))
def test_what_a_match_returns_holds_exactly_those_tokens(prompts: list[list[int]]) -> None:
    ledger = Ledger({BLOCKS: 5})
    cache = PrefixCache(ledger, SIZE)
    content: dict[int, list[int]] = {}  # block -> all tokens up to its end
    for rid, prompt in enumerate(prompts):
        shared, _ = cache.match("", prompt, len(prompt))
        for index, block in enumerate(shared):
            assert content[block] == prompt[: (index + 1) * SIZE]
        fill(cache, ledger, rid, prompt)
        for index, block in enumerate(cache.match("", prompt, len(prompt))[0]):
            content[block] = prompt[: (index + 1) * SIZE]
        ledger.check()
        assert ledger.blocks.idle == len(cache)
        assert not [holder for holder in ledger.blocks.holders() if holder[0] != CACHE]
