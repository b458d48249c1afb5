// Stands in for cluster.cuh, so that the kernels can be tested where there is no GPU: the threads of a cluster are
// fibers, each run until it has to wait for others, in one order or the other, or with warps that get no turn at random, some
// of them for long: a barrier or a wait that is missing shows in one of these. Shared memory begins as NaN, in which a
// number never written shows.

#define CLUSTER_CUH

#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#define __device__
#define __host__
#define KERNEL static void
#define SHARED(Type, name) Type& name = *reinterpret_cast<Type*>(fibers[current].block->memory.data())

struct float2 {
    float x, y;
};

struct float4 {
    float x, y, z, w;
};

struct Barrier {
    int size, arrived = 0, generation = 0;
};

struct Block {
    int rank;
    Barrier barrier;
    std::vector<Barrier> warps;
    std::vector<float> memory;
    std::vector<float> exchanged;
    std::vector<std::array<float, 6>> factors;
    std::vector<const float2*> rows;
};

struct Arrival;

// Copies are made at once, or as late as can be: when somebody waits for them.
struct Copy {
    float* to;
    const float* from;
    int numbers;
    Arrival* arrival;

    void make() const;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Block* block;
    int thread;
    bool done = false;
    std::vector<Copy> stores, fours;
};

static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static Barrier cluster_barrier;
static int current, run_now, cluster_now, clusters_of_run;
static ucontext_t scheduler;

static void wait(Barrier& barrier) {
    int generation = barrier.generation;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) swapcontext(&fibers[current].context, &scheduler);
}

static int thread() { return fibers[current].thread; }
static int run() { return run_now; }
static int cluster() { return cluster_now; }
static int clusters() { return clusters_of_run; }
static int rank() { return fibers[current].block->rank; }
static void block_sync() { wait(fibers[current].block->barrier); }
static void cluster_sync() { wait(cluster_barrier); }

static float shuffle_xor(float value, int bits) {
    Block& block = *fibers[current].block;
    Barrier& warp = block.warps[thread() / 32];
    block.exchanged[thread()] = value;
    wait(warp);
    float others = block.exchanged[thread() ^ bits];
    wait(warp);
    return others;
}

static float fast_exp(float x) { return std::exp(x); }
static float fast_log(float x) { return std::log(x); }
static float fast_divide(float x, float y) { return x / y; }
static float fast_root(float x) { return std::sqrt(x); }
static float to_tf32(float x) { return x; }

// A product of a warp, as cluster.cuh describes it; here in float32.
static void multiply(float (&sums)[4], const float (&a)[4], float upper_b, float lower_b) {
    Block& block = *fibers[current].block;
    Barrier& warp = block.warps[thread() / 32];
    auto* factors = block.factors.data() + thread() / 32 * 32;
    int g = thread() % 32 / 4, t = thread() % 4;
    factors[thread() % 32] = {a[0], a[1], a[2], a[3], upper_b, lower_b};
    wait(warp);
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 8; ++k)
            sums[i] += factors[g * 4 + k % 4][k / 4 * 2 + i / 2] * factors[(2 * t + i % 2) * 4 + k % 4][4 + k / 4];
    wait(warp);
}

static void prefetch_row(const float*, int) {}

using Short = float2;  // as exact as everything here
static Short shorten(float x, float y) { return {x, y}; }

static void multiply_short(float (&sums)[4], const Short (&a)[4], Short upper_b, Short lower_b) {
    // a product of sixteen is the sum of two of eight, in whatever order
    multiply(sums, {a[0].x, a[1].x, a[0].y, a[1].y}, upper_b.x, upper_b.y);
    multiply(sums, {a[2].x, a[3].x, a[2].y, a[3].y}, lower_b.x, lower_b.y);
}

template <class Pick>
static void load(const Short* row, Short (&to)[4], Pick pick) {
    Block& block = *fibers[current].block;
    Barrier& warp = block.warps[thread() / 32];
    auto* rows = block.rows.data() + thread() / 32 * 32;
    rows[thread() % 32] = row;
    wait(warp);
    for (int i = 0; i < 4; ++i) to[i] = pick(rows + 8 * i, thread() % 32 / 4, thread() % 4);
    wait(warp);
}

static void load_short(const Short* row, Short (&to)[4]) {
    load(row, to, [](const Short** rows, int g, int t) { return rows[g][t]; });
}

static void load_short_turned(const Short* row, Short (&to)[4]) {
    auto number = [](const Short* row, int i) { return i % 2 ? row[i / 2].y : row[i / 2].x; };
    load(row, to, [&](const Short** rows, int g, int t) { return Short{number(rows[2 * t], g), number(rows[2 * t + 1], g)}; });
}

struct alignas(16) Arrival {
    int received, due, turns;

    void open() { received = due = turns = 0; }
    void expect(int numbers) { due += numbers, ++turns; }
    void wait(int turn);
};

void Copy::make() const {
    for (int i = 0; i < numbers; ++i) to[i] = from[i];
    if (arrival) arrival->received += numbers;
}

static bool late, uneven;
static std::vector<Copy> copies;

static void fall_behind() {
    if (!uneven || std::rand() % 8) return;
    for (int i = 0; i < 300; ++i) swapcontext(&fibers[current].context, &scheduler);
}

static void copy_row(float* to, const float* from, int numbers, Arrival& arrival) {
    Copy copy{to, from, numbers, &arrival};
    late ? copies.push_back(copy) : copy.make();
    fall_behind();
}

void Arrival::wait(int turn) {
    while (true) {
        std::vector<Copy> others;
        for (Copy& copy : copies) copy.arrival == this ? copy.make() : others.push_back(copy);
        copies = others;
        if (turn < turns && received >= due) return;
        swapcontext(&fibers[current].context, &scheduler);
    }
}

static void copy_four(float* to, const float* from) {
    Copy copy{to, from, 4, nullptr};
    late ? fibers[current].fours.push_back(copy) : copy.make();
}

static void copies_done() {
    for (Copy& four : fibers[current].fours) four.make();
    fibers[current].fours.clear();
}

static void written() {}

static void store_row(float* to, const float* from, int numbers) {
    Copy copy{to, from, numbers, nullptr};
    late ? fibers[current].stores.push_back(copy) : copy.make();
}

static void rows_stored() {
    for (Copy& store : fibers[current].stores) store.make();
    fibers[current].stores.clear();
}

struct Inbox : Arrival {
    void send(int block, float* address, float value) {
        auto there = [&](auto* here) {
            char *own = (char*)fibers[current].block->memory.data(), *other = (char*)blocks[block].memory.data();
            return (decltype(here))((char*)here - own + other);
        };
        *there(address) = value;
        ++*there(&received);
    }

    void receive(int numbers, int turn) {
        if (turn == turns) expect(numbers);
        wait(turn);
    }
};

using Kernel = void (*)(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                        void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*);

static Kernel kernel;
static void** arguments;  // twenty-five, those a kernel does not take being null

static void fiber() {
    void** a = arguments;
    kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
           a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24]);
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

enum Order { FORWARDS, BACKWARDS, UNEVEN };

// Returns whether all threads came to an end; if not, they wait for each other.
static bool launch(Kernel of_kernel, int runs, int clusters, int cluster_size, int threads, int shared_bytes, int order,
                   void** of_arguments) {
    kernel = of_kernel, arguments = of_arguments, late = order == BACKWARDS, uneven = order == UNEVEN;
    clusters_of_run = clusters;
    for (int i = 0; i < runs * clusters; ++i) {
        run_now = i / clusters, cluster_now = i % clusters;
        blocks.assign(cluster_size, {});
        fibers.assign(cluster_size * threads, {});
        cluster_barrier = {cluster_size * threads};
        copies.clear();
        for (int rank = 0; rank < cluster_size; ++rank) {
            Block& block = blocks[rank];
            block.rank = rank;
            block.barrier = {threads};
            block.warps.assign(threads / 32, {32});
            block.memory.assign(shared_bytes / 4, std::numeric_limits<float>::quiet_NaN());
            block.exchanged.assign(threads, 0);
            block.factors.assign(threads, {});
            block.rows.assign(threads, nullptr);
        }
        for (size_t i = 0; i < fibers.size(); ++i) {
            Fiber& own = fibers[i];
            own.block = &blocks[i / threads];
            own.thread = i % threads;
            own.stack.resize(1 << 16);
            getcontext(&own.context);
            own.context.uc_stack.ss_sp = own.stack.data();
            own.context.uc_stack.ss_size = own.stack.size();
            makecontext(&own.context, fiber, 0);
        }
        std::vector<int> asleep(fibers.size() / 32, 0);
        size_t done = 0;
        for (int round = 0; done < fibers.size(); ++round) {
            if (round > 100000) return false;
            done = 0;
            bool waits = false;
            for (size_t i = 0; i < fibers.size(); ++i) {
                current = order == BACKWARDS ? fibers.size() - 1 - i : i;
                if (i % 32 == 0 && order == UNEVEN) {
                    int& turns = asleep[i / 32];
                    turns = turns > 0 ? turns - 1 : std::rand() % 256 ? 0 : 400;
                    waits = turns > 0 || std::rand() % 4 > 0;
                }
                if (!fibers[current].done && !waits) swapcontext(&scheduler, &fibers[current].context);
                done += fibers[current].done;
            }
        }
    }
    return true;
}

constexpr int MOST_SHARED = 227 * 1024;

// As in launch.cuh, but called with the addresses of so many arrays, and what is known there from their shapes.
#define HANDLER(name, kernel, clusters, ...)                                                           \
    extern "C" bool name(int order, int runs, int tasks, int size, int count, void** arrays) {          \
        void* all[25] = {};                                                                             \
        std::vector<long> numbers{__VA_ARGS__};                                                         \
        for (int i = 0; i < count; ++i) all[i] = arrays[i];                                             \
        for (size_t i = 0; i < numbers.size(); ++i) all[count + i] = (void*)numbers[i];                 \
        return launch((Kernel)kernel, runs, clusters, CLUSTER, THREADS, SHARED_BYTES, order, all);      \
    }
