// What the kernels need of a GPU with clusters of blocks (compute capability 9.0 and later), and nothing else does.
//
// Constants of whoever includes it: CLUSTER, the blocks of a cluster; THREADS, of a block; RESIDENT, the blocks that a
// multiprocessor should have registers for. A grid has a row of clusters for each run.
#ifndef CLUSTER_CUH
#define CLUSTER_CUH

#include "launch.cuh"

#define KERNEL static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
#define SHARED(Type, name) extern __shared__ float4 shared_memory[]; Type& name = *reinterpret_cast<Type*>(shared_memory)

__device__ inline int thread() { return threadIdx.x; }
__device__ inline int run() { return blockIdx.y; }
__device__ inline int cluster() { return blockIdx.x / CLUSTER; }
__device__ inline int clusters() { return gridDim.x / CLUSTER; }  // of a run

__device__ inline int rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline void block_sync() { __syncthreads(); }

__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What the thread of the warp has whose number differs in these bits.
__device__ inline float shuffle_xor(float value, int bits) { return __shfl_xor_sync(0xffffffff, value, bits); }

__device__ inline float fast_exp(float x) { return __expf(x); }
__device__ inline float fast_log(float x) { return __logf(x); }
__device__ inline float fast_divide(float x, float y) { return __fdividef(x, y); }

__device__ inline float fast_root(float x) {
    float result;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// A number for the matrix units, whose precision is also that of JAX's products on a GPU unless more is asked for. They cut
// its last 13 bits off: with half of the last bit that stays, that is rounding. (`cvt.rna.tf32` does both, much more slowly.)
__device__ inline float to_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000); }

// A product of a warp, 16 × 8 by 8 × 8. Thread 4g + t has, of the first factor, (g, t), (g + 8, t), (g, t + 4) and
// (g + 8, t + 4); of the second (t, g) and (t + 4, g); of the sums (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1).
__device__ inline void multiply(float (&sums)[4], const float (&a)[4], float upper_b, float lower_b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(upper_b)), "r"(__float_as_uint(lower_b)));
}

__device__ inline unsigned in_shared(const void* address) { return __cvta_generic_to_shared(address); }

// Four numbers from global to shared memory, some time before `copies_done` returns.
__device__ inline void copy_four(float* to, const float* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(in_shared(to)), "l"(from) : "memory");
}

__device__ inline void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Asks for numbers, a multiple of four of them, to be brought near.
__device__ inline void prefetch_row(const float* address, int numbers) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(4 * numbers));
}

// Two numbers in 16 bits each, which have as many digits as the matrix units use.
using Short = unsigned;

__device__ inline Short shorten(float x, float y) {
    Short result;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(x), "f"(y));
    return result;
}

// A product of a warp, 16 × 16 by 16 × 8, of pairs of such numbers. Thread 4g + t has, of the first factor, columns 2t and
// 2t + 1 of rows g and g + 8, then columns 2t + 8 and 2t + 9 of them; of the second, rows 2t and 2t + 1, then 2t + 8 and
// 2t + 9, of column g; of the sums what it has in `multiply`.
__device__ inline void multiply_short(float (&sums)[4], const Short (&a)[4], Short upper_b, Short lower_b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(upper_b), "r"(lower_b));
}

// Four 8 × 8 matrices of such numbers from shared memory: thread 8i + r says where row r of the i-th is. Thread 4g + t gets
// columns 2t and 2t + 1 of row g of each; where they are turned, rows 2t and 2t + 1 of column g.
__device__ inline void load_short(const Short* row, Short (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(in_shared(row))
                 : "memory");
}

__device__ inline void load_short_turned(const Short* row, Short (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(in_shared(row))
                 : "memory");
}

// Counts numbers that are on their way to the shared memory of a block.
struct alignas(16) Arrival {
    unsigned long long barrier;

    __device__ void open() {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(&barrier)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Said by one thread, for each turn.
    __device__ void expect(int numbers) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(&barrier)), "r"(4 * numbers)
                     : "memory");
    }

    // Waits for them, for the `turn`-th time.
    __device__ void wait(int turn) {
        unsigned come = 0;
        while (!come)
            asm volatile(
                "{ .reg .pred come; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 come, [%1], %2;\n"
                "selp.u32 %0, 1, 0, come; }"
                : "=r"(come)
                : "r"(in_shared(&barrier)), "r"(turn % 2)
                : "memory");
    }
};

// Numbers from global memory, a multiple of four of them, which need not stay in the cache.
__device__ inline void copy_row(float* to, const float* from, int numbers, Arrival& arrival) {
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], once; }" ::"r"(
            in_shared(to)),
        "l"(from), "r"(4 * numbers), "r"(in_shared(&arrival.barrier))
        : "memory");
}

// The way back, of rows that were written before a barrier; whoever wrote them says `written` before it. A thread that has
// begun to store rows waits with `rows_stored` before anything else is written in their place.
__device__ inline void written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void store_row(float* to, const float* from, int numbers) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(in_shared(from)), "r"(4 * numbers)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ inline void rows_stored() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Numbers from other blocks of the cluster.
struct Inbox : Arrival {
    // Writes where `address` is in the shared memory of another block, and tells its inbox.
    __device__ void send(int block, float* address, float value) {
        unsigned there, its_barrier;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(in_shared(address)), "r"(block));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_barrier) : "r"(in_shared(&barrier)), "r"(block));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there),
                     "f"(value), "r"(its_barrier)
                     : "memory");
    }

    __device__ void receive(int numbers, int turn) {
        if (thread() == 0) expect(numbers);
        wait(turn);
    }
};

#endif
