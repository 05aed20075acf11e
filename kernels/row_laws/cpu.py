"""A row's law, compiled: temperature, top-k, top-p and min-p in float64, and what is drawn from it.

The law of engine/sampling/laws. Each number comes from IEEE operations in an order that depends on the row alone: sums
go by chunks of CHUNK tokens, with eight running sums each. So the bits depend neither on other rows nor on threads.
NaN counts as -inf, +inf as the largest float32.

Not here: which rows are drawn from, and how often (kernels/rejection_sample/cpu, kernels/chain_draw). Needs numba.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from outrider.kernels.coupled_sample.cpu import LIKELY, arrival_of, latest_words, noise_word
from outrider.kernels.cpu.emitters import LANES, Builder, Value
from outrider.kernels.cpu.simd import hmax, load_f32, operation, vload, vmax, vsplat

CHUNK = 256  # tokens with a common maximum and a common sum
_LARGEST = float(np.finfo(np.float32).max)
_MASS_MARGIN = 1.0 + 1e-9  # ratio; exceeds what the order of a sum can change
_SLACK = 1e-9  # log; exceeds any rounding of an exponential
# of log weights, from the largest's down; what is below them all counts as one more
_BINS_PER_UNIT, _NUM_BINS = 8, 128
# log weights below the largest; only tokens above the first sufficient floor are sorted, as in engine/sampling/ranking
_FLOORS = (-8.0, -16.0, -math.inf)
_FEW = 64  # tokens; up to here the likeliest are found by insertion, not by a sort
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROUNDING = 1.5 * 2.0**52  # added to a number, leaves its integer in the low bits
_I64 = ir.IntType(64)


@operation(types.int64, types.float64)
def _bits(builder: Builder, value: Value) -> Value:
    """The bits of a double."""
    return builder.bitcast(value, _I64)


@operation(types.float64, types.int64)
def _double(builder: Builder, bits: Value) -> Value:
    """The double with these bits."""
    return builder.bitcast(bits, ir.DoubleType())


@operation(types.voidptr, types.int64)
def pointer(builder: Builder, address: Value) -> Value:
    """An address, for carray."""
    return builder.inttoptr(address, ir.PointerType(ir.IntType(8)))


@njit(inline="always")
def exp(x):  # type: ignore[no-untyped-def]
    """e^x for x <= 0, within 2 ulp; 0 below -708 and for NaN. Without branch or call, so that LLVM uses whole vectors.

    Cody-Waite reduction by multiples of ln 2, then the Taylor polynomial of degree 13."""
    clamped = max(x, -708.0)
    shifted = clamped * _LOG2_E + _ROUNDING
    n = shifted - _ROUNDING
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = 1.0 / 6227020800.0
    for factor in (479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0):
        p = p * r + 1.0 / factor
    p = (p * r) * r + r + 1.0
    scaled = _double(_bits(p) + (_bits(shifted) << 52))
    return scaled if x >= -708.0 else 0.0


@njit
def find_maxima(logits, maxima):  # type: ignore[no-untyped-def]
    """maxima [chunks]: of each chunk of logits float32 [V]; returns the largest, at most the largest float32."""
    size, address, largest = len(logits), logits.ctypes.data, np.float32(-np.inf)
    for chunk in range(len(maxima)):
        start, end = chunk * CHUNK, min(size, chunk * CHUNK + CHUNK)
        whole = start + (end - start) // LANES * LANES
        lanes = vsplat(np.float32(-np.inf))
        for token in range(start, whole, LANES):
            lanes = vmax(vload(address + 4 * token), lanes)
        found = hmax(lanes)
        for token in range(whole, end):
            value = load_f32(address + 4 * token)
            found = value if value > found else found
        maxima[chunk] = found
        largest = max(largest, found)
    return min(np.float64(largest), _LARGEST)


@njit(inline="always")
def _behind(logit, largest, temperature):  # type: ignore[no-untyped-def]
    """Log weight below the largest's; float64, as engine/sampling/laws computes it."""
    return min(np.float64(largest), _LARGEST) / temperature - min(np.float64(logit), _LARGEST) / temperature


@njit(inline="always")
def log_weight(logit, largest, temperature):  # type: ignore[no-untyped-def]
    """Log weight; the largest's is 0."""
    return -_behind(logit, largest, temperature)


@njit
def weigh(logits, largest, temperature, weights, sums):  # type: ignore[no-untyped-def]
    """weights float64 [V]: of all tokens, the largest is 1; sums [chunks]: of each chunk."""
    if temperature == 1.0:  # the same bits without divisions, which take a tenth of the time
        for token in range(len(logits)):
            weights[token] = exp(min(np.float64(logits[token]), _LARGEST) - largest)
    else:
        for token in range(len(logits)):
            weights[token] = exp(log_weight(logits[token], largest, temperature))
    for chunk in range(len(sums)):
        sum_chunk(weights, sums, chunk)


@njit
def sum_chunk(weights, sums, chunk):  # type: ignore[no-untyped-def]
    """sums[chunk]: of the chunk's weights, eight running sums and then their sum."""
    start, end = chunk * CHUNK, min(len(weights), chunk * CHUNK + CHUNK)
    whole = start + (end - start) // 8 * 8
    a = b = c = d = e = f = g = h = 0.0
    for token in range(start, whole, 8):
        a += weights[token]
        b += weights[token + 1]
        c += weights[token + 2]
        d += weights[token + 3]
        e += weights[token + 4]
        f += weights[token + 5]
        g += weights[token + 6]
        h += weights[token + 7]
    total = ((a + e) + (c + g)) + ((b + f) + (d + h))
    for token in range(whole, end):
        total += weights[token]
    sums[chunk] = total


@njit
def weigh_kept(logits, kept, largest, temperature, weights, sums):  # type: ignore[no-untyped-def]
    """Sets weights and sums as `weigh` does for the tokens `kept`; the others get weight 0."""
    weights[:] = 0.0
    sums[:] = 0.0
    for token in kept:
        weights[token] = exp(log_weight(logits[token], largest, temperature))
    for token in kept:
        sum_chunk(weights, sums, token // CHUNK)


@njit
def total_of(sums):  # type: ignore[no-untyped-def]
    """The sums' sum, in ascending order."""
    total = 0.0
    for part in sums:
        total += part
    return total


@njit
def pick(weights, sums, uniform):  # type: ignore[no-untyped-def]
    """The token at this quantile in [0, 1), by ascending id; never one without weight; -1 if none has any."""
    place = uniform * total_of(sums)
    before, last, chunk = 0.0, -1, 0
    while chunk < len(sums) and before + sums[chunk] <= place:
        before += sums[chunk]
        chunk += 1
    for current in range(chunk, len(sums)):
        for token in range(current * CHUNK, min(len(weights), current * CHUNK + CHUNK)):
            if weights[token] > 0.0:
                before += weights[token]
                last = token
                if before > place:
                    return token
    if last >= 0:
        return last
    for token in range(len(weights) - 1, -1, -1):  # only rounding leads beyond the last weight
        if weights[token] > 0.0:
            return token
    return -1


@njit
def _above(logits, largest, temperature, maxima, floor):  # type: ignore[no-untyped-def]
    """int64: tokens whose log weight is above the floor, ascending."""
    found = np.empty(len(logits), np.int64)
    count = 0
    for chunk in range(len(maxima)):
        if log_weight(maxima[chunk], largest, temperature) > floor:
            for token in range(chunk * CHUNK, min(len(logits), chunk * CHUNK + CHUNK)):
                if log_weight(logits[token], largest, temperature) > floor:
                    found[count] = token
                    count += 1
    return found[:count]


@njit
def likeliest_first(logits, tokens):  # type: ignore[no-untyped-def]
    """Ascending tokens by falling logit; of equal ones the smaller id first."""
    values = np.empty(len(tokens), np.float32)
    for place in range(len(tokens)):
        values[place] = -logits[tokens[place]]
    return tokens[np.argsort(values, kind="mergesort")]


@njit
def _nucleus_len(logits, tokens, largest, temperature, total, top_p):  # type: ignore[no-untyped-def]
    """Number of tokens, likeliest first, with less than top_p of the total before them."""
    mass, count = 0.0, 0
    for token in tokens:
        if mass >= top_p * total and count > 0:
            break
        mass += exp(log_weight(logits[token], largest, temperature))
        count += 1
    return count


@njit
def _few_likeliest(logits, maxima, count):  # type: ignore[no-untyped-def]
    """Implements `likeliest` for a small count by insertion, which needs no sort where the law is flat."""
    tokens, values = np.empty(count, np.int64), np.full(count, -np.inf, np.float32)
    found = 0
    for chunk in range(len(maxima)):
        if found == count and not maxima[chunk] > values[count - 1]:
            continue
        for token in range(chunk * CHUNK, min(len(logits), chunk * CHUNK + CHUNK)):
            value = logits[token]
            if not value > -np.inf or (found == count and not value > values[count - 1]):
                continue
            place = min(found, count - 1)
            while place > 0 and values[place - 1] < value:
                tokens[place], values[place] = tokens[place - 1], values[place - 1]
                place -= 1
            tokens[place], values[place] = token, value
            found = min(found + 1, count)
    return tokens[:found]


@njit
def likeliest(logits, largest, temperature, maxima, count):  # type: ignore[no-untyped-def]
    """int64 [at most count]: the likeliest tokens, likeliest first; ties go to the smaller id."""
    if count <= _FEW:
        return _few_likeliest(logits, maxima, count)
    tokens = np.empty(0, np.int64)
    for floor in _FLOORS:
        tokens = _above(logits, largest, temperature, maxima, floor)
        if len(tokens) >= count:
            break
    return likeliest_first(logits, tokens)[:count]


@njit(inline="always")
def _bin_of(logit, largest, temperature):  # type: ignore[no-untyped-def]
    """Returns a logit's bin, which does not decrease as the logit falls.

    It does without `_behind`, whose divisions took longer than the exponentials.
    """
    return np.int64(min((largest - logit) * (_BINS_PER_UNIT / temperature), np.float64(_NUM_BINS)))


@njit
def _in_bins(logits, largest, temperature, maxima, first, end):  # type: ignore[no-untyped-def]
    """int64: tokens of the bins [first, end), ascending."""
    found = np.empty(len(logits), np.int64)
    count = 0
    for chunk in range(len(maxima)):
        if maxima[chunk] > -np.inf and _bin_of(maxima[chunk], largest, temperature) < end:
            for token in range(chunk * CHUNK, min(len(logits), chunk * CHUNK + CHUNK)):
                if logits[token] > -np.inf and first <= _bin_of(logits[token], largest, temperature) < end:
                    found[count] = token
                    count += 1
    return found[:count]


@njit
def _nucleus(logits, largest, temperature, maxima, top_p, weights, sums):  # type: ignore[no-untyped-def]
    """The likeliest tokens that hold top_p of the mass. Overwrites weights and sums.

    Tokens are counted in bins by their log weight, and only the bins at the border are sorted: in a flat law the
    nucleus is most of the vocabulary."""
    weigh(logits, largest, temperature, weights, sums)
    wanted = top_p * total_of(sums)
    masses = np.zeros(_NUM_BINS + 1)
    for token in _in_bins(logits, largest, temperature, maxima, 0, _NUM_BINS):
        masses[_bin_of(logits[token], largest, temperature)] += weights[token]
    mass, border = 0.0, 0
    while border < _NUM_BINS and (mass + masses[border]) * _MASS_MARGIN < wanted:
        mass += masses[border]
        border += 1
    kept = _in_bins(logits, largest, temperature, maxima, 0, border)
    while border <= _NUM_BINS and (mass < wanted or len(kept) == 0):
        tokens = likeliest_first(logits, _in_bins(logits, largest, temperature, maxima, border, border + 1))
        count = 0
        for token in tokens:
            if mass >= wanted and len(kept) + count > 0:
                break
            mass += weights[token]
            count += 1
        kept = np.concatenate((kept, tokens[:count]))
        border += 1
    return kept


@njit
def keep(logits, largest, maxima, temperature, top_k, top_p, min_p, weights, sums):  # type: ignore[no-untyped-def]
    """Returns the int64 tokens that top-k, then top-p over the rest, then min-p leave; one of them is on.

    Overwrites weights and sums.
    """
    if top_k > 0:
        tokens = likeliest(logits, largest, temperature, maxima, top_k)
        if top_p < 1.0:
            total = 0.0
            for token in tokens:
                total += exp(log_weight(logits[token], largest, temperature))
            tokens = tokens[: _nucleus_len(logits, tokens, largest, temperature, total, top_p)]
    elif top_p < 1.0:
        tokens = _nucleus(logits, largest, temperature, maxima, top_p, weights, sums)
    else:
        # Filtered exactly below.
        tokens = _above(logits, largest, temperature, maxima, math.log(min_p) - _SLACK)
    if min_p > 0.0:
        count = 0
        for token in tokens:
            if exp(log_weight(logits[token], largest, temperature)) >= min_p:
                tokens[count] = token
                count += 1
        tokens = tokens[:count]
    return tokens


@njit
def race(logits, largest, maxima, temperature, ids, low, high):  # type: ignore[no-untyped-def]
    """The winner of the race of all tokens (engine/sampling/coupling): kernels/coupled_sample/cpu on logits.

    ids int64 [V]: the tokens' ids in the noise; empty: their places in the row. -1: no token can win."""
    winner, first = -1, math.inf
    bounds = np.empty(LIKELY + 1)
    latest_words(bounds, first)
    for chunk in range(len(maxima)):
        if _behind(maxima[chunk], largest, temperature) < LIKELY:
            for token in range(chunk * CHUNK, min(len(logits), chunk * CHUNK + CHUNK)):
                behind = _behind(logits[token], largest, temperature)
                if behind < LIKELY:
                    word = noise_word(ids[token] if len(ids) else token, low, high)
                    if word <= bounds[int(behind)]:
                        arrival = arrival_of(word, behind)
                        if arrival < first:
                            winner, first = token, arrival
                            latest_words(bounds, first)
    for chunk in range(len(maxima)):
        start, end = chunk * CHUNK, min(len(logits), chunk * CHUNK + CHUNK)
        if _smallest_word(start, end, ids, low, high) > bounds[LIKELY]:
            continue
        for token in range(start, end):
            behind = _behind(logits[token], largest, temperature)
            word = noise_word(ids[token] if len(ids) else token, low, high)
            if word <= bounds[LIKELY] and LIKELY <= behind < math.inf:
                arrival = arrival_of(word, behind)
                if arrival < first or (arrival == first and token < winner):
                    winner, first = token, arrival
                    latest_words(bounds, first)
    return winner


@njit
def _smallest_word(start, end, ids, low, high):  # type: ignore[no-untyped-def]
    """Returns the smallest noise word of the tokens [start, end). Two loops, so that each of them vectorises."""
    smallest = np.uint32(0xFFFFFFFF)
    if len(ids):
        for token in range(start, end):
            smallest = min(smallest, noise_word(ids[token], low, high))
    else:
        for token in range(start, end):
            smallest = min(smallest, noise_word(token, low, high))
    return smallest


@njit
def race_kept(logits, kept, largest, temperature, ids, low, high):  # type: ignore[no-untyped-def]
    """The winner of the race of the tokens `kept`; -1: there are none."""
    winner, first = -1, math.inf
    for token in kept:
        word = noise_word(ids[token] if len(ids) else token, low, high)
        arrival = arrival_of(word, _behind(logits[token], largest, temperature))
        if arrival < first or (arrival == first and token < winner):
            winner, first = token, arrival
    return winner


@njit
def floats_at(address, count):  # type: ignore[no-untyped-def]
    """float32 [count] at an address."""
    return carray(pointer(address), count, np.float32)


@njit
def doubles_at(address, count):  # type: ignore[no-untyped-def]
    """float64 [count] at an address."""
    return carray(pointer(address), count, np.float64)


@njit
def integers_at(address, count):  # type: ignore[no-untyped-def]
    """int64 [count] at an address."""
    return carray(pointer(address), count, np.int64)
