"""Where parameters lie in Megatron-Core's buffers, by hand; real buffers are compared in test_allocations.py."""

from exgrpo_megatron.plan.buffers import overlap_bucket_size, plain_buffer, shared_buffer
from exgrpo_megatron.plan.parameters import Parameter


def parameters(*sizes, shared=()):
    return [Parameter(str(index), size, index in shared) for index, size in enumerate(sizes)]


def test_without_shared_state_parameters_follow_one_another():
    assert plain_buffer(parameters(3, 5)).elements == 8


def test_with_shared_state_they_begin_at_64_and_the_bucket_ends_at_a_multiple_of_128_and_of_the_ranks():
    # In reverse: 5 numbers at 0, 70 at 64, 3 at 192; the end, 195, becomes 256, and 384 for 3 ranks.
    buffer = shared_buffer(parameters(3, 70, 5), 2, None)
    assert buffer.spans == ((0, 5), (64, 134), (192, 195))
    assert buffer.elements == 256
    assert shared_buffer(parameters(3, 70, 5), 3, None).elements == 384
    # Halves of 128: the first has 5 + 64 numbers, the second 6 + 3.
    assert [buffer.owned(rank, 2) for rank in range(2)] == [69, 9]


def test_a_bucket_is_closed_once_it_is_large_enough():
    buffer = shared_buffer(parameters(10, 130, 100), 2, 100)
    assert buffer.buckets == ((0, 128), (128, 384), (384, 512))
    assert sum(buffer.owned(rank, 2) for rank in range(2)) == 240


def test_a_tied_embedding_has_a_bucket_of_its_own():
    buffer = shared_buffer(parameters(10, 20, shared={0}), 2, None)
    assert buffer.buckets == ((0, 128), (128, 256))


def test_megatrons_bucket_grows_with_the_ranks():
    assert [overlap_bucket_size(ranks) for ranks in (1, 64)] == [40_000_000, 64_000_000]
