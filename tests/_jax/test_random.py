"""The generator of noise and dropout: what would show if its hash mixed badly. Bounds are 5 standard errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from helpers.marks import by_default
from metaleo._jax.random import FACTORS, dropout_masks, normals, random_words

SIZE = 2**18
KEY = jax.random.key(7)


def draw(key=KEY, stream=0, size=SIZE):
    return np.asarray(random_words(key, (size,), stream))


def uniform(key=KEY, stream=0):
    return draw(key, stream) / 2.0**32


def bits(word):
    """(word, 32) zeros and ones."""
    return (word[..., None] >> np.arange(32, dtype=np.uint32)) & 1


def key_with_bit_flipped(bit):
    data = jax.random.key_data(KEY)
    return jax.random.wrap_key_data(data.at[bit // 32].set(data[bit // 32] ^ jnp.uint32(2 ** (bit % 32))))


def others():
    """Words that must have nothing to do with those of KEY: (name, words)."""
    yield from ((f"stream {stream}", draw(stream=stream)) for stream in (1, 2, 3))
    yield from ((f"bit {bit}", draw(key_with_bit_flipped(bit))) for bit in (0, 1, 31, 32, 33, 63))


def correlation(one, other):
    """In standard errors."""
    return np.corrcoef(one, other)[0, 1] * np.sqrt(len(one))


def test_a_word_is_a_function_of_key_stream_and_position():
    np.testing.assert_array_equal(draw(), draw())
    np.testing.assert_array_equal(draw(size=100), draw()[:100])
    np.testing.assert_array_equal(random_words(KEY, (4, 25)).reshape(-1), draw(size=100))
    under_vmap = jax.vmap(lambda key: random_words(key, (100,)))(jnp.stack([KEY, jax.random.key(8)]))
    np.testing.assert_array_equal(under_vmap[0], draw(size=100))
    for name, other in others():
        assert np.mean(draw() == other) < 1e-4, name
    assert len(np.unique(draw())) == SIZE  # for one key and stream the hash is a bijection of positions


def test_words_are_uniform():
    values = uniform()
    assert abs(values.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / SIZE)
    assert abs(values.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / SIZE)
    shares = bits(draw()).mean(0)
    assert np.abs(shares - 1 / 2).max() < 5 * np.sqrt(1 / 4 / SIZE)
    for byte in range(4):
        counts = np.bincount((draw() >> np.uint32(8 * byte)) & 255, minlength=256)
        chi_square = np.sum((counts - SIZE / 256) ** 2) / (SIZE / 256)
        assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255), byte


def test_pairs_of_neighbours_are_uniform():
    """Serial test: the leading four bits of a word and of the one after it, over 256 bins."""
    leading = draw() >> np.uint32(28)
    counts = np.bincount(16 * leading[:-1:2] + leading[1::2], minlength=256)
    assert abs(np.sum((counts - SIZE / 512) ** 2) / (SIZE / 512) - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 64, 640, 641, 3200, 2**16])
def test_neighbours_are_uncorrelated(lag):
    assert abs(correlation(uniform()[:-lag], uniform()[lag:])) < 5
    agreement = (bits(draw()[:-lag]) == bits(draw()[lag:])).mean(0)
    assert np.abs(agreement - 1 / 2).max() < 5 * np.sqrt(1 / 4 / (SIZE - lag))


def test_streams_and_keys_are_uncorrelated():
    for name, other in others():
        assert abs(correlation(uniform(), other / 2.0**32)) < 5, name
        agreement = (bits(draw()) == bits(other)).mean(0)
        assert np.abs(agreement - 1 / 2).max() < 5 * np.sqrt(1 / 4 / SIZE), name


def test_a_stream_is_not_that_of_a_neighbouring_key():
    """Keys and streams both end up in the same sum."""
    data = jax.random.key_data(KEY)
    for i in range(2):
        for distance in (1, 2, 3, -1):
            key = jax.random.wrap_key_data(data.at[i].add(jnp.uint32(distance % 2**32)))
            for stream in range(4):
                assert (draw(key, size=100) != draw(stream=stream, size=100)).mean() > 0.9


def test_all_bits_of_a_key_count():
    """Both halves go into where a sequence starts; the second also into each word, or keys could share a start."""
    first, second = jax.random.key_data(KEY)
    other = jnp.stack([first - jnp.uint32(12345) * jnp.uint32(FACTORS[1]), second + jnp.uint32(12345)])
    same_start = draw(jax.random.wrap_key_data(other))
    assert (same_start != draw()).mean() > 0.9
    assert abs(correlation(uniform(), same_start / 2.0**32)) < 5


def test_tasks_of_a_meta_batch_are_uncorrelated():
    """Keys as training has them: folded in with the number of a step, and split."""
    keys = [key for step in range(3) for key in jax.random.split(jax.random.fold_in(KEY, step), 4)]
    correlations = np.corrcoef([uniform(key) for key in keys]) * np.sqrt(SIZE)
    assert np.abs(correlations[~np.eye(12, dtype=bool)]).max() < 5


def test_no_stream_is_another_one_shifted():
    """Words are hashed from sums, so keys and streams could be the same sequence from another start."""
    first = set(draw(size=2**14).tolist())
    for name, other in others():
        assert len(first & set(other[: 2**14].tolist())) < 5, name  # by chance 1/16


def test_avalanche():
    """Any bit of the key flips half of the bits of a word, at whichever position, and each of them."""
    size = 2**13
    before = bits(draw(size=size))
    for bit in range(64):
        flipped = bits(draw(key_with_bit_flipped(bit), size=size)) != before
        assert abs(flipped.mean() - 1 / 2) < 0.005, bit
        assert np.abs(flipped.mean(0) - 1 / 2).max() < 6 * np.sqrt(1 / 4 / size), bit


def test_a_stream_is_not_longer_than_its_positions():
    with pytest.raises(ValueError, match="2²⁸ words"):
        jax.eval_shape(lambda: random_words(KEY, (2**28 + 1,)))


def test_normals_are_normal():
    values = np.asarray(normals(KEY, (SIZE,)), np.float64)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 5 / np.sqrt(SIZE)
    assert abs(values.var() - 1) < 5 * np.sqrt(2 / SIZE)
    assert abs(stats.skew(values)) < 5 * np.sqrt(6 / SIZE)
    assert abs(stats.kurtosis(values)) < 5 * np.sqrt(24 / SIZE)
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert 4.0 < np.abs(values).max() < 6.0  # of 2¹⁸; at most √(50 log 2) = 5.9 with lengths of 24 bits
    assert (
        stats.kstest(np.abs(values[np.abs(values) > 3]), lambda x: 1 - stats.norm.sf(x) / stats.norm.sf(3)).pvalue
        > 1e-4
    )


def test_normals_come_in_independent_pairs():
    """(r cos φ, r sin φ): uncorrelated, as are their squares; r²/2 exponential and φ uniform."""
    one, other = np.asarray(normals(KEY, (SIZE,)), np.float64).reshape(2, -1)
    assert abs(correlation(one, other)) < 5
    assert abs(correlation(one**2, other**2)) < 5
    assert stats.kstest((one**2 + other**2) / 2, "expon").pvalue > 1e-4
    assert stats.kstest(np.arctan2(other, one) / (2 * np.pi) + 0.5, "uniform").pvalue > 1e-4
    for lag in (1, 2, 64):
        assert abs(correlation(one[:-lag], one[lag:])) < 5


def test_the_series_are_cosine_and_sine():
    """On the circle to float32 rounding, whatever the angle."""
    one, other = np.asarray(normals(KEY, (SIZE,)), np.float64).reshape(2, -1)
    lengths = (np.asarray(random_words(KEY, (2, SIZE // 2)))[0] >> 8) * 2.0**-24 + 2.0**-25
    np.testing.assert_allclose(one**2 + other**2, -2 * np.log(lengths), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", by_default([(5, 7)], [(), (1,), (3,), (5, 7), (2, 0)]))
def test_any_shape(shape):
    values = normals(KEY, shape)
    assert values.shape == shape
    assert values.dtype == jnp.float32
    assert jnp.isfinite(values).all()
    assert random_words(KEY, shape).shape == dropout_masks(KEY, 0.5, shape).shape == shape


@pytest.mark.slow
def test_odd_numbers_of_normals_lose_only_the_last():
    np.testing.assert_array_equal(normals(KEY, (6,))[:5], normals(KEY, (5,)))


def test_streams_of_normals_are_uncorrelated():
    first = np.asarray(normals(KEY, (SIZE,)), np.float64)
    for stream in (1, 2, 3):
        assert abs(correlation(first, np.asarray(normals(KEY, (SIZE,), stream), np.float64))) < 5


@pytest.mark.parametrize("keep", [0.0, 1 / 256, 0.3, 0.711524088, 1.0])
def test_share_kept(keep):
    mask = dropout_masks(KEY, keep, (300, 701))
    assert abs(float(mask.mean()) - keep) <= 5 * np.sqrt(keep * (1 - keep) / mask.size)
    assert mask.all() == (keep == 1)
    assert mask.any() == (keep > 0)


def test_a_higher_share_keeps_what_a_lower_one_does():
    """One draw serves every share: trials of a search that share a key differ in their share alone."""
    low, high = dropout_masks(KEY, 0.3, (SIZE,)), dropout_masks(KEY, 0.6, (SIZE,))
    assert (high | ~low).all()


@pytest.mark.parametrize("lag", [1, 2, 3, 4])
def test_entries_of_a_mask_are_independent(lag):
    mask = np.asarray(dropout_masks(KEY, 0.5, (SIZE,)), float)
    assert abs(correlation(mask[:-lag], mask[lag:])) < 5
    rows = np.asarray(dropout_masks(KEY, 0.5, (11, 25, 640)), float)  # steps and examples are masked independently
    flat = rows.reshape(11, -1)
    assert abs(correlation(flat[:-1].ravel(), flat[1:].ravel())) < 5
