// BLAKE3 of many pieces of memory at once: kernels of which every thread works by itself.
//
// A piece is cut into leaves of 1 KiB. `leaf_values` computes the chaining value of each leaf, one
// thread a leaf; `join_values` joins neighbouring values, one thread a pair, and is launched once
// for each level of the tree, until every piece has one value left: its digest. On each level an odd
// last value goes up as it is, which gives the tree that BLAKE3 prescribes, whose left sides are
// full. Nothing waits for anything within a launch, so a plain loop over the threads does the same:
// `tests/support/blake3_host.cpp` compiles this file like that.
//
// `first` arrays have one entry more than there are pieces: the values of piece p are those from
// first[p] to first[p + 1].

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define LEAF_BYTES 1024u
#define BLOCK_BYTES 64u
#define BLOCK_WORDS 16
#define VALUE_WORDS 8
#define ROUNDS 7

// Domain flags of the specification.
#define LEAF_START 1u
#define LEAF_END 2u
#define PARENT 4u
#define ROOT 8u

#define INLINE __device__ __forceinline__ static

// The initial chaining value: that of SHA-256.
#define INITIAL_0 0x6A09E667u
#define INITIAL_1 0xBB67AE85u
#define INITIAL_2 0x3C6EF372u
#define INITIAL_3 0xA54FF53Au
#define INITIAL_4 0x510E527Fu
#define INITIAL_5 0x9B05688Cu
#define INITIAL_6 0x1F83D9ABu
#define INITIAL_7 0x5BE0CD19u

INLINE u32 rotate(u32 word, int count) { return word >> count | word << (32 - count); }

INLINE void set_initial(u32 *value) {
    value[0] = INITIAL_0;
    value[1] = INITIAL_1;
    value[2] = INITIAL_2;
    value[3] = INITIAL_3;
    value[4] = INITIAL_4;
    value[5] = INITIAL_5;
    value[6] = INITIAL_6;
    value[7] = INITIAL_7;
}

INLINE void mix(u32 &a, u32 &b, u32 &c, u32 &d, u32 one, u32 other) {
    a += b + one;
    d = rotate(d ^ a, 16);
    c += d;
    b = rotate(b ^ c, 12);
    a += b + other;
    d = rotate(d ^ a, 8);
    c += d;
    b = rotate(b ^ c, 7);
}

// Bring the words of a block into the order of the next round. All indices are constants, so this
// only renames registers.
INLINE void reorder(u32 *block) {
    const u32 word[BLOCK_WORDS] = {block[2],  block[6],  block[3],  block[10], block[7], block[0],
                                   block[4],  block[13], block[1],  block[11], block[12], block[5],
                                   block[9],  block[14], block[15], block[8]};
#pragma unroll
    for (int i = 0; i < BLOCK_WORDS; i++) block[i] = word[i];
}

// The compression function, cut to its first half, which is all that a chaining value or a digest
// of 32 bytes needs. Leaves `block` reordered.
INLINE void compress(u32 *value, u32 *block, u64 counter, u32 length, u32 flags) {
    u32 s[16] = {value[0],  value[1],  value[2],     value[3],            value[4], value[5],
                 value[6],  value[7],  INITIAL_0,    INITIAL_1,           INITIAL_2, INITIAL_3,
                 (u32)counter, (u32)(counter >> 32), length, flags};
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        mix(s[0], s[4], s[8], s[12], block[0], block[1]);
        mix(s[1], s[5], s[9], s[13], block[2], block[3]);
        mix(s[2], s[6], s[10], s[14], block[4], block[5]);
        mix(s[3], s[7], s[11], s[15], block[6], block[7]);
        mix(s[0], s[5], s[10], s[15], block[8], block[9]);
        mix(s[1], s[6], s[11], s[12], block[10], block[11]);
        mix(s[2], s[7], s[8], s[13], block[12], block[13]);
        mix(s[3], s[4], s[9], s[14], block[14], block[15]);
        reorder(block);
    }
#pragma unroll
    for (int i = 0; i < VALUE_WORDS; i++) value[i] = s[i] ^ s[i + 8];
}

// Load a full block from any address. Words are read whole and aligned, also where the block is
// not: then the first and the last have bytes beside it, which lie in the same page as its own.
INLINE void load_block(u32 *block, u64 address) {
    if ((address & 15) == 0) {
        const uint4 *quads = (const uint4 *)address;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 quad = quads[i];
            block[4 * i] = quad.x;
            block[4 * i + 1] = quad.y;
            block[4 * i + 2] = quad.z;
            block[4 * i + 3] = quad.w;
        }
        return;
    }
    const u32 *words = (const u32 *)(address & ~3ull);
    const u32 shift = 8 * (u32)(address & 3);
    u32 low = words[0];
#pragma unroll
    for (int i = 0; i < BLOCK_WORDS; i++) {
        if (shift == 0) {
            block[i] = words[i];
        } else {
            const u32 high = words[i + 1];
            block[i] = low >> shift | high << (32 - shift);
            low = high;
        }
    }
}

// Load a block of fewer bytes, with zeros behind them.
INLINE void load_short_block(u32 *block, u64 address, u32 count) {
    const u8 *bytes = (const u8 *)address;
#pragma unroll
    for (int i = 0; i < BLOCK_WORDS; i++) {
        u32 word = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (4 * i + j < count) word |= (u32)bytes[4 * i + j] << 8 * j;
        }
        block[i] = word;
    }
}

// Find the piece that has value number `wanted`; none is empty.
INLINE u32 find_piece(const u32 *first, u32 pieces, u32 wanted) {
    u32 low = 0;
    u32 high = pieces;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (first[middle] <= wanted) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

extern "C" __global__ void leaf_values(const u64 *__restrict__ addresses,
                                       const u64 *__restrict__ lengths,
                                       const u32 *__restrict__ first, u32 pieces,
                                       u32 *__restrict__ values) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= first[pieces]) return;
    const u32 piece = find_piece(first, pieces, thread);
    const u64 leaf = thread - first[piece];
    const u64 left = lengths[piece] - leaf * LEAF_BYTES;
    const u32 length = left < LEAF_BYTES ? (u32)left : LEAF_BYTES;
    const u64 address = addresses[piece] + leaf * LEAF_BYTES;
    const u32 is_root = first[piece + 1] - first[piece] == 1 ? ROOT : 0;
    u32 value[VALUE_WORDS];
    set_initial(value);
    u32 done = 0;
#pragma unroll 1
    do {
        u32 block[BLOCK_WORDS];
        const u32 count = length - done < BLOCK_BYTES ? length - done : BLOCK_BYTES;
        if (count == BLOCK_BYTES) {
            load_block(block, address + done);
        } else {
            load_short_block(block, address + done, count);
        }
        u32 flags = done == 0 ? LEAF_START : 0;
        done += count;
        if (done == length) flags |= LEAF_END | is_root;
        compress(value, block, leaf, count, flags);
    } while (done < length);
#pragma unroll
    for (int i = 0; i < VALUE_WORDS; i++) values[(u64)thread * VALUE_WORDS + i] = value[i];
}

extern "C" __global__ void join_values(const u32 *__restrict__ below,
                                       const u32 *__restrict__ first_below,
                                       const u32 *__restrict__ first, u32 pieces,
                                       u32 *__restrict__ values) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= first[pieces]) return;
    const u32 piece = find_piece(first, pieces, thread);
    const u32 pair = 2 * (thread - first[piece]);
    const u32 count = first_below[piece + 1] - first_below[piece];
    const u32 *source = below + (u64)(first_below[piece] + pair) * VALUE_WORDS;
    u32 value[VALUE_WORDS];
    if (pair + 1 == count) {
#pragma unroll
        for (int i = 0; i < VALUE_WORDS; i++) value[i] = source[i];
    } else {
        u32 block[BLOCK_WORDS];
#pragma unroll
        for (int i = 0; i < BLOCK_WORDS; i++) block[i] = source[i];
        set_initial(value);
        compress(value, block, 0, BLOCK_BYTES, count == 2 ? PARENT | ROOT : PARENT);
    }
#pragma unroll
    for (int i = 0; i < VALUE_WORDS; i++) values[(u64)thread * VALUE_WORDS + i] = value[i];
}
