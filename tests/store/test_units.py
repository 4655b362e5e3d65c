"""The store's decisions, without a database: checkpoint rules, TTL, tallies, plans, waits."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import BatchmillError, ConfigError
from batchmill.oal import double_limbs, exact_double, load
from batchmill.sources import Grain
from batchmill.store import (
    BatchGapError,
    Cell,
    CheckpointMismatchError,
    FencedError,
    NamesClashError,
    NotAStoreError,
    RetryPolicy,
    StatementFailedError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreMissingError,
    StoreReadOnlyError,
    StoreRefusedError,
    StoreUnavailableError,
    StoreVersionError,
    TooManyColumnsError,
    cells,
    decode,
    encode_label_sums,
    encode_labels,
    encode_numbers,
    open_store,
)
from batchmill.store.address import without_password
from batchmill.store.buckets import (
    cutoff_day,
    day_of,
    day_start,
    first_bucket,
    last_bucket,
    newer,
)
from batchmill.store.retry import Retrier, TransientError
from batchmill.store.sql.entities import EntityCache, KnownEntity, fit_text
from batchmill.store.sql.stream import Checkpoint, Exempt, StreamState, check_claim, is_replay
from batchmill.store.states import (
    Plan,
    compact_label_sums,
    compact_labels,
    compact_numbers,
    decode_label_sums,
    decode_labels,
    decode_numbers,
    join,
    split,
)

COUNTS = st.integers(1, 2**62)
NUMBERS = st.dictionaries(st.integers(-(2**40), 2**40), COUNTS, min_size=1)
LABELS = st.dictionaries(st.text(), COUNTS, min_size=1)
SUMS = st.dictionaries(st.text(), st.tuples(st.integers(-(2**62), 2**62), COUNTS), min_size=1)

KNOWN = StreamState("mine", 4, 7, "token")


@pytest.mark.parametrize("committed", [7, 6])
def test_the_store_may_be_level_or_one_ahead(committed: int) -> None:
    """A checkpoint that marked the last batch done, or was about to, goes with the store."""
    check_claim("live", KNOWN, Checkpoint("mine", fresh=False, committed=committed, planned=7))


@pytest.mark.parametrize("planned", [6, None, 8])
def test_a_batch_that_is_in_must_have_been_planned(planned: int | None) -> None:
    """One ahead, but its input was not laid down: new input would be skipped as a replay."""
    with pytest.raises(CheckpointMismatchError, match="skipped") as caught:
        check_claim("live", KNOWN, Checkpoint("mine", fresh=False, committed=6, planned=planned))
    assert caught.value.reason == "unplanned"


def test_an_emptied_checkpoint_does_not_go_with_a_first_batch() -> None:
    """Batch 0 is in, and the checkpoint knows nothing of it; only who has no log may come so."""
    known = StreamState("mine", 1, 0, None)
    with pytest.raises(CheckpointMismatchError) as caught:
        check_claim("live", known, Checkpoint("mine", fresh=True, committed=None, planned=None))
    assert caught.value.reason == "unplanned"
    check_claim(
        "live", known, Checkpoint("mine", fresh=True, committed=None, planned=Exempt.NO_LOG)
    )


@pytest.mark.parametrize(
    ("last", "committed", "reason"),
    [(7, 8, "behind"), (7, 5, "ahead"), (None, 0, "behind"), (1, None, "ahead")],
)
def test_any_other_distance_is_a_mismatch(
    last: int | None, committed: int | None, reason: str
) -> None:
    """Store behind, or ahead by more than one: one of them is an older copy."""
    known = StreamState("mine", 1, last, None)
    with pytest.raises(CheckpointMismatchError) as caught:
        check_claim("live", known, Checkpoint("mine", fresh=False, committed=committed))
    assert caught.value.reason == reason


def test_none_counts_as_the_batch_before_the_first() -> None:
    """Nothing on either side goes together, and so does a first batch that was not marked yet."""
    for last in (None, 0):
        known = StreamState("mine", 1, last, None)
        check_claim("live", known, Checkpoint("mine", fresh=False, committed=None))


def test_replays_are_known_by_number_or_token() -> None:
    """A known number is a replay, and so is what has the token of the last commit."""
    assert is_replay("live", KNOWN, 4, 7, "other")
    assert not is_replay("live", KNOWN, 4, 8, "other")
    assert is_replay("live", KNOWN, 4, 8, "token")
    with pytest.raises(BatchGapError):
        is_replay("live", KNOWN, 4, 9, "other")
    with pytest.raises(FencedError):
        is_replay("live", KNOWN, 3, 7, "token")


def test_the_cutoff_is_whole_days_before_the_newest() -> None:
    """By the calendar, leap day included; nothing is cut off while the store is empty."""
    assert cutoff_day(202403021200, 7) == 20240224
    assert cutoff_day(202403010000, 1) == 20240229
    assert cutoff_day(None, 7) == 0
    assert (newer(None, 3), newer(4, None), newer(4, 3), newer(None, None)) == (3, 4, 4, None)


@pytest.mark.parametrize(
    ("grain", "bucket"), [(Grain.MINUTE, 202403010000), (Grain.HOUR, 2024030100)]
)
def test_a_days_first_bucket_is_not_below_it(grain: Grain, bucket: int) -> None:
    """The first bucket of a day is kept where that day is, the last of the day before is not."""
    assert bucket >= day_start(grain, 20240301) > 20240229 * (bucket // 20240301)
    assert day_of(grain, bucket) == 20240301


def test_moments_and_buckets_bound_any_grain() -> None:
    """A day's end is its last minute; a minute lies in its hour; a moment in its bucket."""
    assert last_bucket(Grain.MINUTE, 20240229) == 202402292359
    assert first_bucket(Grain.HOUR, 202402291359) == 2024022913
    moment = datetime(2024, 2, 29, 13, 59, 30, tzinfo=UTC)
    assert last_bucket(Grain.MINUTE, moment) == 202402291359


@given(NUMBERS, NUMBERS)
def test_number_tallies_merge_by_joining(one: dict[int, int], two: dict[int, int]) -> None:
    """Joined texts read as the sum of both, before and after compacting."""
    joined = f"{encode_numbers(one)},{encode_numbers(two)}"
    both = {key: one.get(key, 0) + two.get(key, 0) for key in one | two}
    assert decode_numbers(joined) == both == decode_numbers(compact_numbers(joined) or "")
    assert (compact_numbers(joined) or "").count(",") == len(both) - 1


@given(LABELS, LABELS)
def test_label_tallies_merge_by_joining(one: dict[str, int], two: dict[str, int]) -> None:
    """The same by label, whatever characters it has."""
    joined = f"{encode_labels(one)},{encode_labels(two)}"
    both = {key: one.get(key, 0) + two.get(key, 0) for key in one | two}
    assert decode_labels(joined) == both == decode_labels(compact_labels(joined)[0] or "")


@given(SUMS, SUMS)
def test_label_sums_merge_by_joining(
    one: dict[str, tuple[int, int]], two: dict[str, tuple[int, int]]
) -> None:
    """The same for sum and count."""
    joined = f"{encode_label_sums(one)},{encode_label_sums(two)}"
    both = {}
    for key in one | two:
        pairs = [sums[key] for sums in (one, two) if key in sums]
        both[key] = (sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
    assert decode_label_sums(joined) == both
    assert decode_label_sums(compact_label_sums(joined)[0] or "") == both


def test_a_tally_without_keys_is_none() -> None:
    """An empty tally is null in the store, never an empty text."""
    assert (encode_numbers({}), encode_labels({}), encode_label_sums({})) == (None, None, None)


def test_each_state_has_its_cells() -> None:
    """Every function's states are laid out, and read back from nothing as nothing."""
    script = """
        a = from(Endpoint.*).cpm(); b = from(Endpoint.latency).longAvg();
        c = from(Endpoint.latency).max(); d = from(Endpoint.latency).min();
        e = from(Endpoint.latency).percentile2(10); f = from(Endpoint.latency).histogram(10, 5);
        g = from(Endpoint.*).labelCount(name); h = from(Endpoint.*).labelAvg(name, latency);
        i = from(Endpoint.latency).apdex(serviceName, status);
    """
    expected = {
        "a": "SUM",
        "b": "SUM SUM",
        "c": "MAX_INT",
        "d": "MIN_INT",
        "e": "NUMBERS",
        "f": "NUMBERS",
        "g": "LABELS",
        "h": "LABEL_SUMS",
        "i": "SUM SUM SUM",
    }
    for metric in load(script):
        kinds = [cell for state in metric.states for cell in cells(state)]
        assert " ".join(cell.name for cell in kinds) == expected[metric.name]
        nothing = [decode(state, [None] * len(cells(state))) for state in metric.states]
        assert metric.values(nothing, 1) is None
        plan = Plan.of(metric)
        assert (Plan.load(plan.dump()), plan.cells) == (plan, tuple(kinds))


def test_doubles_are_kept_as_exact_limbs() -> None:
    """A sum of doubles takes five cells, and an extreme of doubles a cell of its own kind."""
    catalog_script = "x = from(ServiceInstanceJVMCPU.usePercent).doubleAvg();"
    (metric,) = load(catalog_script)
    total, count = metric.states
    assert cells(total) == (Cell.SUM,) * 5
    whole, *fraction = double_limbs(0.1)
    limbs = [*split(whole), *fraction]
    assert exact_double(decode(total, limbs)) == 0.1
    assert metric.values([decode(total, limbs), decode(count, [1])], 1) == 0.1
    (extreme,) = load("y = from(ServiceInstanceJVMCPU.usePercent).maxDouble();")
    assert cells(extreme.states[0]) == (Cell.MAX_FLOAT,)
    assert Fraction(decode(extreme.states[0], [2.5])) == Fraction(5, 2)


def test_the_entity_cache_is_bounded() -> None:
    """It forgets what was used longest ago, and never holds more than it may."""
    cache = EntityCache(size=2)
    known = {name: KnownEntity(key, name, "{}", frozenset()) for key, name in enumerate("abc")}
    cache.add({("service", name): known[name] for name in "ab"})
    assert cache.get(("service", "a")) == known["a"]
    cache.add({("service", "c"): known["c"]})
    assert [cache.get(("service", name)) for name in "abc"] == [known["a"], None, known["c"]]


def test_the_entity_cache_forgets_what_may_be_removed() -> None:
    """What was last seen before the days that are kept is not answered any more."""
    cache = EntityCache()
    known = KnownEntity(1, "a", "{}", frozenset(), 20240301)
    cache.add({("service", "a"): known})
    assert cache.get(("service", "a"), since=20240301) == known
    assert cache.get(("service", "a"), since=20240302) is None


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_halves_are_added_up_each_for_itself(values: list[int]) -> None:
    """The sum of the upper and of the lower halves is the sum of the numbers, below zero too."""
    halves = [split(value) for value in values]
    assert all(0 <= low < 2**32 and -(2**31) <= high < 2**31 for high, low in halves)
    assert join(sum(high for high, _ in halves), sum(low for _, low in halves)) == sum(values)


@pytest.mark.parametrize("text", ["", "plain", "ä" * 1000, "x" * 2000])
def test_a_text_that_fits_stays_as_it_is(text: str) -> None:
    """Up to 2,000 bytes without a NUL nothing is changed."""
    assert fit_text(text) == text


def test_texts_that_do_not_fit_stay_different() -> None:
    """Cut, cleaned, and told apart by a hash; a cut never falls into a character."""
    texts = ["x" * 2001, "x" * 2002, "ä" * 1001, "a\0b", "a\ufffdb", "a\0c", "ä" * 3000 + "\0"]
    made = {fit_text(text) for text in texts}
    assert len(made) == len(texts)
    assert all(len(text.encode()) <= 2000 and "\0" not in text for text in made)


def test_waits_grow_up_to_the_cap() -> None:
    """Each wait doubles, never past the longest, and chance only shortens it."""
    policy = RetryPolicy(initial_ms=100, max_ms=1000, multiplier=2, jitter=0.5)
    assert [policy.delay_s(attempt, 0) for attempt in (1, 2, 5, 5000)] == [0.1, 0.2, 1.0, 1.0]
    assert policy.delay_s(1, 1) == 0.05


def test_retrying_gives_up_with_the_cause() -> None:
    """After the given time the last fault is told, with how often it was tried."""
    retrier = Retrier(RetryPolicy(initial_ms=1, give_up_after_s=0), "somewhere")

    def work() -> None:
        raise TransientError("wrapped") from OSError("no route")

    with pytest.raises(StoreUnavailableError, match="tried 1 time ") as caught:
        retrier.run(work)
    assert isinstance(caught.value.__cause__, OSError)
    assert "no route" in str(caught.value)


def test_closing_ends_a_wait() -> None:
    """Work that waits for its next try ends when the store is closed."""
    retrier = Retrier(RetryPolicy(initial_ms=60_000, max_ms=60_000), "somewhere")
    tries = 0

    def work() -> None:
        nonlocal tries
        tries += 1
        retrier.close()
        raise TransientError

    with pytest.raises(StoreClosedError):
        retrier.run(work)
    assert tries == 1


@pytest.mark.parametrize(
    "settings", [{"initial_ms": -1}, {"multiplier": 0.5}, {"jitter": 2}, {"give_up_after_s": -1}]
)
def test_a_wrong_policy_is_refused(settings: dict[str, float]) -> None:
    """Each setting is checked when it is made."""
    with pytest.raises(ConfigError):
        RetryPolicy(**settings)


@pytest.mark.parametrize("url", ["", "sqlite://", "sqlite:///", "mysql://x/y", "store.db"])
def test_a_wrong_address_is_refused(url: str) -> None:
    """The message shows which addresses there are."""
    with pytest.raises(ConfigError, match=r"sqlite:///relative\.db"):
        open_store(url)


@pytest.mark.parametrize("setting", ["ttl_days", "top_n"])
def test_a_wrong_setting_is_refused(setting: str) -> None:
    """Both must be whole numbers of at least 1."""
    with pytest.raises(ConfigError, match=setting):
        open_store("sqlite:///x.db", **{setting: 0})  # type: ignore[arg-type]


def test_a_password_is_never_shown() -> None:
    """Not in the login, not in a parameter, not in the error about a wrong address."""
    assert without_password("postgresql://u:s3@h:1/d?x=1") == "postgresql://u@h:1/d?x=1"
    assert "s3" not in without_password("postgresql://h/d?user=u&password=s3")
    with pytest.raises(ConfigError) as caught:
        open_store("mysql://u:s3@h/d")
    assert "s3" not in str(caught.value)


ERRORS: list[StoreError] = [
    StoreMissingError("url"),
    NotAStoreError("url", "why"),
    StoreVersionError("url", 9, 1),
    StoreRefusedError("url", "why"),
    StatementFailedError("url", "why"),
    StoreReadOnlyError("url", "why"),
    StoreFullError("where", 17, "why"),
    StoreUnavailableError("url", 3, 1.5, "why"),
    StoreClosedError("url"),
    StoreInUseError("url", "live", {"host": "h", "pid": 1, "since": "now"}),
    FencedError("live", 1, 2),
    BatchGapError("live", 3, 2),
    CheckpointMismatchError("live", "other", "detail", "advice"),
    TooManyColumnsError("Endpoint", 2001, 2000),
    NamesClashError("x", "why"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pickle_and_keep_what_they_know(error: StoreError) -> None:
    """An error comes through pickle with its message and attributes, and is also a built-in one."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert isinstance(error, BatchmillError)
    builtin = [base for base in type(error).__mro__ if base.__module__ == "builtins"]
    assert builtin[0] is not Exception
