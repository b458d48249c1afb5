// The words of `randomness.py`.
//
// Constants: GOLDEN, FIRST_FACTOR, SECOND_FACTOR.

constexpr unsigned STEP = GOLDEN, FIRST = FIRST_FACTOR, SECOND = SECOND_FACTOR;

struct Stream {
    unsigned start, second;

    __device__ Stream(const unsigned* key, unsigned number)
        : start(key[0] + key[1] * SECOND + number * (STEP * STEP)), second(key[1]) {}

    __device__ unsigned leading(unsigned position) const {
        unsigned x = position * STEP + start;
        x = (x ^ (x >> 16)) * FIRST + second;
        return (x ^ (x >> 15)) * SECOND;
    }
    __device__ unsigned word(unsigned position) const {
        unsigned x = leading(position);
        return x ^ (x >> 15);
    }
};
