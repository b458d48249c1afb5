// What XLA calls. Arrays are as the Python side has them: an axis of runs in front, then mostly one of tasks. Their sizes
// tell all sizes, their order is that of the arguments, and results follow.

#include "inner_loop.h"
#include "optimiser.h"
#include "queries.h"
#include "random.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

struct Arrays {
    ffi::RemainingArgs given;
    ffi::RemainingRets results;

    ffi::AnyBuffer operator[](size_t i) const {
        return i < given.size() ? *given.get<ffi::AnyBuffer>(i) : **results.get<ffi::AnyBuffer>(i - given.size());
    }
    long size(size_t i, int axis) const { return (*this)[i].dimensions()[axis]; }
    // How many numbers a run has of it.
    long numbers(size_t i) const { return (*this)[i].element_count() / size(i, 0); }
    // From the beginning of a run's part, or of an entry's where it has so many numbers.
    template <class Number = float>
    Number* at(size_t i, long run) const { return at<Number>(i, run, numbers(i)); }
    template <class Number = float>
    Number* at(size_t i, long entry, long numbers) const {
        return static_cast<Number*>((*this)[i].untyped_data()) + entry * numbers;
    }
};

#define FUNCTION(NAME, CALL, ...) \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME, CALL, ffi::Ffi::Bind() __VA_ARGS__ .RemainingArgs().RemainingRets())

static Sizes sizes(const Arrays& arrays, size_t inputs) {  // and what follows them
    size_t finetune_inputs = inputs + 1, projected = inputs + 2, targets = inputs + 4;
    return {arrays.size(inputs, 1), arrays.size(targets, 2), arrays.size(inputs, 3), arrays.size(projected, 4),
            arrays.size(inputs, 4), arrays.size(inputs, 2), arrays.size(finetune_inputs, 2)};
}

static Given given(const Arrays& arrays, size_t first, long run) {
    auto at = [&](size_t i) { return arrays.at(first + i, run); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9)};
}

static ffi::Error forward(int32_t official, float initial, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    Arrays arrays = {arguments, results};
    Sizes n = sizes(arrays, 5);
    for (long run = 0; run < arrays.size(0, 0); ++run) {
        auto at = [&](size_t i) { return arrays.at(i, run); };
        Path path = {at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18)};
        forward_of_run(n, {official != 0, initial}, at(0), given(arrays, 1, run), path);
    }
    return ffi::Error::Success();
}

static ffi::Error backward(int32_t official, float initial, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    Arrays arrays = {arguments, results};
    Sizes n = sizes(arrays, 4);
    for (long run = 0; run < arrays.size(0, 0); ++run) {
        auto at = [&](size_t i) { return arrays.at(i, run); };
        Back back = {at(10), at(11), at(12), at(13), at(14), at(15), at(16), at(17),
                     at(18), at(19), at(20), at(21), at(22), at(23), at(24), at(25)};
        backward_of_run(n, {official != 0, initial}, given(arrays, 0, run), back);
    }
    return ffi::Error::Success();
}

FUNCTION(adapt_forward, forward, .Attr<int32_t>("official").Attr<float>("initial"));
FUNCTION(adapt_backward, backward, .Attr<int32_t>("official").Attr<float>("initial"));

static ffi::Error judge(int32_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    Arrays arrays = {arguments, results};
    enum { WEIGHTS, KEYS, KEEP, TARGETS, SHARE, ROWS_OF_TABLE, TABLE, LOSSES, RIGHT, OF_WEIGHTS };
    Queries n = {arrays.size(TARGETS, 3), arrays.size(TARGETS, 2), arrays.size(TABLE, 1), static_cast<uint32_t>(stream)};
    for (long task = 0; task < arrays.size(TARGETS, 0) * arrays.size(TARGETS, 1); ++task)
        judge_task(
            n, arrays.at(WEIGHTS, task, n.way * n.dim), arrays.at<uint32_t>(KEYS, task, 2), *arrays.at(KEEP, task, 1),
            arrays.at(TARGETS, task, n.queries * n.way), arrays.at(SHARE, task, n.queries),
            arrays.at<int32_t>(ROWS_OF_TABLE, task, n.queries), arrays.at(TABLE, 0, 0), arrays.at(LOSSES, task, 1),
            arrays.at(RIGHT, task, 1), arrays.at(OF_WEIGHTS, task, n.way * n.dim)
        );
    return ffi::Error::Success();
}

FUNCTION(judge_queries, judge, .Attr<int32_t>("stream"));

static ffi::Error draw(int32_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    Arrays arrays = {arguments, results};
    for (long run = 0; run < arrays.size(0, 0); ++run)
        normals(arrays.at<uint32_t>(0, run), static_cast<uint32_t>(stream), arrays.numbers(1), arrays.at(1, run));
    return ffi::Error::Success();
}

FUNCTION(draw_normals, draw, .Attr<int32_t>("stream"));

// The corrections; of all leaves gradients, then first, then second moments. Whether the gradient is finite; directions, and
// the new moments.
static ffi::Error optimise(
    float clip, float first_decay, float first_share, float second_decay, float second_share, float small,
    ffi::RemainingArgs arguments, ffi::RemainingRets results
) {
    Arrays arrays = {arguments, results};
    Adam adam = {clip, first_decay, first_share, second_decay, second_share, small};
    size_t leaves = arguments.size() / 3, finite = arguments.size();
    for (long run = 0; run < arrays.size(0, 0); ++run) {
        std::vector<Leaf> all;
        for (size_t i = 1; i <= leaves; ++i) {
            auto at = [&](size_t first) { return arrays.at(first + i, run); };
            all.push_back({arrays.numbers(i), at(0), at(leaves), at(2 * leaves), at(finite), at(finite + leaves),
                           at(finite + 2 * leaves)});
        }
        *arrays.at(finite, run) = adam_step(adam, arrays.at(0, run), all);
    }
    return ffi::Error::Success();
}

FUNCTION(
    adam_update, optimise,
    .Attr<float>("clip").Attr<float>("first_decay").Attr<float>("first_share").Attr<float>("second_decay")
        .Attr<float>("second_share").Attr<float>("small")
);

static ffi::Error join(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    Arrays arrays = {arguments, results};
    for (long run = 0; run < arrays.size(0, 0); ++run) {
        float* to = arrays.at(arguments.size(), run);
        for (size_t i = 0; i < arguments.size(); to += arrays.numbers(i++))
            std::memcpy(to, arrays.at(i, run), sizeof(float) * arrays.numbers(i));
    }
    return ffi::Error::Success();
}

FUNCTION(join_arrays, join);
