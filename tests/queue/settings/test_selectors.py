"""Partition selectors: where items go, and that they stay there."""

from __future__ import annotations

import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill import ConfigError, PartitionPolicy, PartitionSelector, ThreadPolicy
from batchmill.queue.layout import fewest_owned, index_of_least
from batchmill.queue.strategies import KEY_BUCKETS, key_bucket, type_hash_of
from tests.kit.queues import Green, Recorder, Red, make_queue
from tests.kit.threads import WAIT_S, Gate
from tests.queue.kit import Crimson, make_classes

names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=20)
keys = st.one_of(
    st.integers(),
    st.text(),
    st.binary(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(), st.text()),
    st.none(),
    st.booleans(),
)


def test_type_hash_sees_the_class_only() -> None:
    """All items of one class go to one partition."""
    select = PartitionSelector.type_hash()
    assert len({select(Red(number), 64) for number in range(100)}) == 1


def test_type_hash_is_the_same_in_every_run() -> None:
    """A class's hash comes from its name: no address, and nothing of this process, is in it."""
    assert type_hash_of(str) == 0xFED657CC  # the CRC-32 of "builtins.str"


@given(prefix=names)
def test_type_hash_spreads(prefix: str) -> None:
    """100 classes of one family, hashed over 100 partitions, make no heap and use many."""
    select = PartitionSelector.type_hash()
    places = Counter(select(cls(), 100) for cls in make_classes(100, prefix))
    assert len(places) > 40  # by pure chance it would be 63
    assert max(places.values()) <= 10


@given(cls=st.sampled_from([Red, Green, Crimson]), count=st.integers(1, 5000))
def test_type_hash_answers_a_partition(cls: type, count: int) -> None:
    """The answer is an index below the number of partitions."""
    assert 0 <= PartitionSelector.type_hash()(cls(), count) < count


def test_round_robin_goes_round() -> None:
    """Items go to the partitions in turn."""
    select = PartitionSelector.round_robin()
    first, *others = [select(Red(), 3) for _ in range(7)]
    assert others == [(first + step) % 3 for step in range(1, 7)]


def test_round_robins_do_not_share_their_turn() -> None:
    """Two queues with a round-robin selector each both begin at the same partition."""
    one, other = PartitionSelector.round_robin(), PartitionSelector.round_robin()
    assert one(Red(), 3) == other(Red(), 3)


@given(key=keys, count=st.integers(1, 5000))
def test_key_hash_answers_a_partition(key: object, count: int) -> None:
    """Whatever the key, the answer is an index below the number of partitions."""
    select = PartitionSelector.key_hash(lambda item: key)
    assert 0 <= select(Red(), count) < count


@given(key=keys)
def test_key_bucket_is_in_range(key: int) -> None:
    """Whatever the key, its bucket is one of KEY_BUCKETS."""
    assert 0 <= key_bucket(key) < KEY_BUCKETS


def test_every_key_bucket_is_used() -> None:
    """Keys enough fill all of the buckets: none is out of reach."""
    assert {key_bucket(number) for number in range(100_000)} == set(range(KEY_BUCKETS))


@given(number=st.integers(-(2**53), 2**53))
def test_equal_keys_share_a_bucket(number: int) -> None:
    """Keys that are equal are one key, whatever their type."""
    assert key_bucket(number) == key_bucket(float(number))


@given(
    start=st.integers(-(2**40), 2**40), step=st.sampled_from([1, 2, 8, 1000, 4096, 2**20, 2**32])
)
def test_integer_keys_spread_whatever_they_have_in_common(start: int, step: int) -> None:
    """1000 numbers in even steps, also steps of a power of two, use hundreds of buckets."""
    used = Counter(key_bucket(start + step * index) for index in range(1000))
    assert len(used) > 500
    assert max(used.values()) <= 16


@given(prefix=st.text(max_size=10))
def test_text_keys_spread(prefix: str) -> None:
    """1000 texts with a common prefix use hundreds of buckets."""
    used = Counter(key_bucket(f"{prefix}{index}") for index in range(1000))
    assert len(used) > 700
    assert max(used.values()) <= 10


def test_key_hash_needs_a_callable() -> None:
    """key_hash() of something that cannot be called is refused at once."""
    with pytest.raises(ConfigError) as caught:
        PartitionSelector.key_hash("key")  # type: ignore[arg-type]
    assert caught.value.field == "key"


@pytest.mark.parametrize("count", [4, 100])
def test_registered_classes_get_a_partition_each(count: int) -> None:
    """As many handlers as partitions: one class in each, where a hash would reach 63 %."""
    with make_queue(
        threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.fixed(count)
    ) as queue:
        for cls in make_classes(count):
            queue.add_handler(cls, print)
        placed = [len(partition.classes) for partition in queue.stats().partitions]
    assert placed == [1] * count


def test_grown_partitions_get_a_class_each() -> None:
    """100 handlers on adaptive partitions: 100 partitions with one class in each."""
    with make_queue(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive()) as queue:
        for cls in make_classes(100):
            queue.add_handler(cls, print)
        placed = [len(partition.classes) for partition in queue.stats().partitions]
    assert placed == [1] * 100


def test_heavy_class_has_its_partition_to_itself() -> None:
    """Classes are placed by weight: two light ones share before one joins the heavy one."""
    heavy, *light = make_classes(3)
    with make_queue(partitions=PartitionPolicy.fixed(2)) as queue:
        queue.add_handler(heavy, print, weight=5.0)
        for cls in light:
            queue.add_handler(cls, print, weight=1.0)
        placed = [partition.classes for partition in queue.stats().partitions]
    assert placed == [(heavy,), tuple(light)]


def test_removed_class_makes_room_for_the_next() -> None:
    """A class that lost its handler no longer counts when the next one looks for a place."""
    first, second, third = make_classes(3)
    with make_queue(partitions=PartitionPolicy.fixed(2)) as queue:
        queue.add_handler(first, print)
        queue.add_handler(second, print)
        queue.remove_handler(second)
        queue.add_handler(third, print)
        placed = [partition.classes for partition in queue.stats().partitions]
    assert placed == [(first,), (second, third)]


def test_unregistered_classes_are_spread_by_hash() -> None:
    """100 classes nobody registered use many of 100 partitions, not one."""
    with make_queue(partitions=PartitionPolicy.fixed(100)) as queue:
        for cls in make_classes(100):
            queue.produce(cls())
        used = [partition for partition in queue.stats().partitions if partition.classes]
    assert len(used) > 40


def test_class_keeps_its_partition_through_growth() -> None:
    """A class that has a partition stays there when the queue grows: its order depends on it."""
    with make_queue(partitions=PartitionPolicy.adaptive()) as queue:
        queue.add_handler(Red, print)
        home = [p.index for p in queue.stats().partitions if Red in p.classes]
        for cls in make_classes(50):
            queue.add_handler(cls, print)
        queue.produce(Red())
        assert [p.index for p in queue.stats().partitions if Red in p.classes] == home


def test_unregistered_class_keeps_its_partition_when_registered() -> None:
    """Items that were queued before the handler came and those after are on one lane."""
    with make_queue(partitions=PartitionPolicy.fixed(16)) as queue:
        queue.produce(Red())
        home = [p.index for p in queue.stats().partitions if Red in p.classes]
        queue.add_handler(Red, print)
        queue.produce(Red())
        assert [p.index for p in queue.stats().partitions if Red in p.classes] == home


def test_key_hash_keeps_a_key_in_one_partition() -> None:
    """Items with one key, of whatever class, are all in one partition."""
    selector = PartitionSelector.key_hash(lambda item: item.number)
    gate = Gate()
    with make_queue(consumer=gate, partitions=PartitionPolicy.fixed(8), selector=selector) as queue:
        queue.produce(Red(0))
        gate.wait_entered()
        for _ in range(10):
            queue.produce(Red(7))
            queue.produce(Green(7))
        assert [p.used for p in queue.stats().top_n(2)] == [20, 0]


def test_key_hash_keeps_a_key_in_its_partition_through_growth() -> None:
    """A key that was seen stays in its partition when the queue grows: its order depends on it."""
    selector = PartitionSelector.key_hash(lambda item: item.number)
    gate = Gate()
    with make_queue(partitions=PartitionPolicy.adaptive(), selector=selector) as queue:
        queue.add_handler(Red, gate)
        queue.produce(Red(0))
        gate.wait_entered()
        for number in range(20):
            queue.produce(Red(number))
        for cls in make_classes(50):
            queue.add_handler(cls, print)
        for number in range(20):
            queue.produce(Red(number))
        assert [p.used for p in queue.stats().top_n(2)] == [40, 0]


def test_keys_are_spread_over_the_partitions() -> None:
    """Key buckets are dealt out: as many keys as partitions leave hardly a partition without."""
    selector = PartitionSelector.key_hash(lambda item: item.number)
    handler = Recorder()
    with make_queue(partitions=PartitionPolicy.fixed(8), selector=selector) as queue:
        queue.add_handler(Red, handler)
        for number in range(64):
            queue.produce(Red(number))
        assert queue.flush(WAIT_S)
        assert [p.drained > 0 for p in queue.stats().partitions] == [True] * 8


def test_round_robin_fills_partitions_evenly() -> None:
    """12 items of one class over 4 partitions: 3 in each."""
    with make_queue(
        consumer=print,
        partitions=PartitionPolicy.fixed(4),
        selector=PartitionSelector.round_robin(),
    ) as queue:
        for number in range(12):
            queue.produce(number + 1)
        queue.flush(WAIT_S)
        assert [p.drained for p in queue.stats().partitions] == [3, 3, 3, 3]


def test_own_selector_decides() -> None:
    """A callable (item, partition_count) -> int is a selector: items go where it says."""
    with make_queue(
        consumer=lambda batch: None,
        partitions=PartitionPolicy.fixed(4),
        selector=lambda item, count: item.number % count,
    ) as queue:
        for number in (1, 1, 3, 5):
            queue.produce(Red(number))
        assert queue.flush(WAIT_S)
        assert [p.drained for p in queue.stats().partitions] == [0, 3, 0, 1]


def test_own_selector_sees_the_growth() -> None:
    """The count a selector is given is the number of partitions at that moment."""
    seen: list[int] = []

    def select(item: object, count: int) -> int:
        seen.append(count)
        return 0

    with make_queue(partitions=PartitionPolicy.adaptive(), selector=select) as queue:
        for cls in make_classes(3):
            queue.add_handler(cls, print)
            queue.produce(cls())
    assert seen == [1, 2, 3]


def test_least_is_the_first_of_the_smallest() -> None:
    """Of several equally small values the first is taken."""
    assert index_of_least([3, 1, 2, 1]) == 1


@given(values=st.lists(st.floats(allow_nan=False), min_size=1))
def test_least_is_nobody_elses(values: list[float]) -> None:
    """No value is smaller than the one that index_of_least() points at."""
    assert values[index_of_least(values)] == min(values)


@pytest.mark.parametrize(
    ("owners", "owner"),
    [
        ([], 0),
        ([0, 1, 2], 0),
        ([0, 1, 2, 0], 1),
        ([0, 0, 0, 1, 2, 2], 1),
        ([1, 2, 2], 0),
    ],
)
def test_new_partition_goes_to_the_thread_with_the_fewest(owners: list[int], owner: int) -> None:
    """A partition that is added goes to whoever serves the fewest, however that came about."""
    assert fewest_owned(owners, 3) == owner


@given(owners=st.lists(st.integers(0, 7)), more=st.integers(1, 100))
def test_growth_evens_out(owners: list[int], more: int) -> None:
    """Partitions added one by one never widen the gap between threads, and close it in the end."""
    before = [owners.count(thread) for thread in range(8)]
    for _ in range(more):
        owners.append(fewest_owned(owners, 8))
    after = [owners.count(thread) for thread in range(8)]
    assert max(after) - min(after) <= max(max(before) - min(before), 1)
