// NCCL between processes of one machine, in shared memory: real sums, each collective counted, the host waits for every one.
// A rank whose peer never comes waits until its communicator is aborted.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>
#include <numeric>

#include "counts.h"

#define API extern "C" __attribute__((visibility("default")))
typedef int Result;  // ncclResult_t
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5 };
struct Id {
    char bytes[128];
};

static const size_t PART = 4 << 20;  // bytes that a rank shows to the others at a time

struct Meeting {  // at the beginning of the shared memory; the ranks' parts follow
    std::atomic<int> arrived, round;
};

struct Communicator {
    int size, rank;
    Meeting* meeting;
    char* parts;
    std::atomic<bool> aborted{false};

    char* part(int of) { return parts + of * PART; }

    bool everyone() {
        int round = meeting->round.load();
        if (meeting->arrived.fetch_add(1) + 1 == size) {
            meeting->arrived.store(0);
            meeting->round.fetch_add(1);
            return true;
        }
        while (meeting->round.load() == round) {
            if (aborted) return false;
            usleep(50);
        }
        return true;
    }

    // What each rank sends is shown to all of them, a part at a time; `receive(offset, bytes)` reads the parts.
    template <class Receive>
    Result exchange(const void* mine, size_t bytes, Receive receive) {
        for (size_t offset = 0; offset < bytes; offset += PART) {
            size_t now = std::min(PART, bytes - offset);
            memcpy(part(rank), (const char*)mine + offset, now);
            if (!everyone()) return SYSTEM_ERROR;
            receive(offset, now);
            if (!everyone()) return SYSTEM_ERROR;
        }
        return SUCCESS;
    }
};

// --- Sums --------------------------------------------------------------------------------------------------------------

struct BFloat {
    unsigned short bits;
    BFloat(float value) {
        unsigned whole;
        memcpy(&whole, &value, 4);
        bits = (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    operator float() const {
        unsigned whole = (unsigned)bits << 16;
        float value;
        memcpy(&value, &whole, 4);
        return value;
    }
};

template <class Number>
static void reduce(Communicator* all, char* to, size_t bytes, int operation) {
    for (size_t place = 0; place < bytes / sizeof(Number); place++) {
        auto at = [&](int rank) { return ((Number*)all->part(rank))[place]; };
        auto total = 0 + at(0);
        for (int rank = 1; rank < all->size; rank++) {
            auto other = 0 + at(rank);
            if (operation == 1) total = total * other;
            else if (operation == 2) total = std::max(total, other);
            else if (operation == 3) total = std::min(total, other);
            else total = total + other;  // also an average, and a sum of scaled numbers: no number is judged here
        }
        ((Number*)to)[place] = (Number)total;
    }
}

struct Type {
    size_t width;
    void (*reduce)(Communicator*, char*, size_t, int);
};
static const Type TYPES[] = {  // in the order of ncclDataType_t
    {1, reduce<signed char>}, {1, reduce<unsigned char>}, {4, reduce<int>},      {4, reduce<unsigned>}, {8, reduce<long>},
    {8, reduce<unsigned long>}, {2, reduce<_Float16>},    {4, reduce<float>},    {8, reduce<double>},   {2, reduce<BFloat>},
};

// --- Communicators -----------------------------------------------------------------------------------------------------

API Result ncclGetVersion(int* version) { return *version = 22900, SUCCESS; }
API Result ncclGetUniqueId(Id* id) {
    memset(id, 0, sizeof *id);
    static std::atomic<int> number{0};
    snprintf(id->bytes, sizeof id->bytes, "/rehearsal-%d-%d", (int)getpid(), number++);
    return SUCCESS;
}
static Result join(Communicator** made, int size, const Id& id, int rank) {
    size_t bytes = 4096 + size * PART;
    int file = shm_open(id.bytes, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, bytes)) return SYSTEM_ERROR;
    char* memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return SYSTEM_ERROR;
    *made = new Communicator{size, rank, (Meeting*)memory, memory + 4096};
    if (!(*made)->everyone()) return SYSTEM_ERROR;
    if (rank == 0) shm_unlink(id.bytes);
    return SUCCESS;
}
API Result ncclCommInitRank(Communicator** made, int size, Id id, int rank) { return join(made, size, id, rank); }
API Result ncclCommInitRankConfig(Communicator** made, int size, Id id, int rank, void*) { return join(made, size, id, rank); }
API Result ncclCommInitRankScalable(Communicator** made, int size, int rank, int, Id* ids, void*) { return join(made, size, ids[0], rank); }
API Result ncclCommInitAll(Communicator** made, int size, const int*) {  // DataParallel: the GPUs of one process
    for (int rank = 0; rank < size; rank++) made[rank] = new Communicator{size, rank, nullptr, nullptr};
    return SUCCESS;
}
API Result ncclCommAbort(Communicator* all) { return all->aborted = true, SUCCESS; }
API Result ncclCommDestroy(Communicator*) { return SUCCESS; }
API Result ncclCommFinalize(Communicator*) { return SUCCESS; }
API Result ncclCommGetAsyncError(Communicator*, int* error) { return *error = 0, SUCCESS; }
API Result ncclCommCount(Communicator* all, int* size) { return *size = all->size, SUCCESS; }
API Result ncclCommUserRank(Communicator* all, int* rank) { return *rank = all->rank, SUCCESS; }
API Result ncclCommRegister() { return SUCCESS; }
API Result ncclCommDeregister() { return SUCCESS; }
API const char* ncclGetErrorString(int) { return "an error of the rehearsal's NCCL"; }
API const char* ncclGetLastError(void*) { return ""; }
API Result ncclMemAlloc(void** place, size_t size) { return allocate_on_device(place, size) != cudaSuccess; }
API Result ncclMemFree(void* place) { return release_on_device(place) != cudaSuccess; }
API Result ncclRedOpCreatePreMulSum(int* operation, void*, int, int, Communicator*) { return *operation = 0, SUCCESS; }
API Result ncclRedOpDestroy(int, Communicator*) { return SUCCESS; }

// --- Collectives -------------------------------------------------------------------------------------------------------

// Messages between pairs of ranks, as an all-to-all has them: all that are sent in a group are shown to all ranks at its end.
struct Message {
    int peer;
    char* place;
    size_t bytes;
};
static thread_local std::vector<Message> sent, taken;
static thread_local Communicator* talking = nullptr;
static thread_local int depth = 0;

static Result deliver() {
    Communicator* all = talking;
    talking = nullptr;
    if (!all) return SUCCESS;
    count("collectives");
    std::vector<size_t> lengths(all->size), table(all->size * all->size);  // table[from * size + to]
    std::string mine;
    for (const Message& message : sent) lengths[message.peer] += message.bytes, mine.append(message.place, message.bytes);
    Result result = all->exchange(lengths.data(), all->size * sizeof(size_t), [&](size_t, size_t bytes) {
        for (int rank = 0; rank < all->size; rank++) memcpy(&table[rank * all->size], all->part(rank), bytes);
    });
    size_t longest = 0;
    for (int rank = 0; rank < all->size; rank++)
        longest = std::max(longest, std::accumulate(&table[rank * all->size], &table[(rank + 1) * all->size], size_t(0)));
    mine.resize(longest);
    std::vector<std::string> shown(all->size, std::string(longest, 0));
    if (result == SUCCESS) result = all->exchange(mine.data(), longest, [&](size_t offset, size_t bytes) {
        for (int rank = 0; rank < all->size; rank++) memcpy(&shown[rank][offset], all->part(rank), bytes);
    });
    for (const Message& message : taken) {
        const size_t* row = &table[message.peer * all->size];
        memcpy(message.place, &shown[message.peer][std::accumulate(row, row + all->rank, size_t(0))], message.bytes);
    }
    sent.clear(), taken.clear();
    return result;
}
static Result enqueue(std::vector<Message>& messages, const void* place, size_t number, int type, int peer, Communicator* all) {
    if (!all->meeting || !depth) return INVALID_USAGE;
    messages.push_back({peer, (char*)place, number * TYPES[type].width});
    talking = all;
    return SUCCESS;
}
API Result ncclGroupStart() { return depth++, SUCCESS; }
API Result ncclGroupEnd() { return --depth ? SUCCESS : deliver(); }
API Result ncclSend(const void* from, size_t number, int type, int peer, Communicator* all, cudaStream_t) { return enqueue(sent, from, number, type, peer, all); }
API Result ncclRecv(void* to, size_t number, int type, int peer, Communicator* all, cudaStream_t) { return enqueue(taken, to, number, type, peer, all); }

API Result ncclAllReduce(const void* from, void* to, size_t number, int type, int operation, Communicator* all, cudaStream_t) {
    count("collectives");
    if (!all->meeting) return from == to ? SUCCESS : (memmove(to, from, number * TYPES[type].width), SUCCESS);
    return all->exchange(from, number * TYPES[type].width, [&](size_t offset, size_t bytes) {
        TYPES[type].reduce(all, (char*)to + offset, bytes, operation);
    });
}
API Result ncclReduce(const void* from, void* to, size_t number, int type, int operation, int root, Communicator* all, cudaStream_t) {
    count("collectives");
    if (!all->meeting) return from == to || !to ? SUCCESS : (memmove(to, from, number * TYPES[type].width), SUCCESS);
    return all->exchange(from, number * TYPES[type].width, [&](size_t offset, size_t bytes) {
        if (all->rank == root) TYPES[type].reduce(all, (char*)to + offset, bytes, operation);
    });
}
API Result ncclBroadcast(const void* from, void* to, size_t number, int type, int root, Communicator* all, cudaStream_t) {
    count("collectives");
    if (!all->meeting) return SUCCESS;
    return all->exchange(all->rank == root ? from : to, number * TYPES[type].width, [&](size_t offset, size_t bytes) {
        memcpy((char*)to + offset, all->part(root), bytes);
    });
}
API Result ncclBcast(void* place, size_t number, int type, int root, Communicator* all, cudaStream_t stream) {
    return ncclBroadcast(place, place, number, type, root, all, stream);
}
API Result ncclAllGather(const void* from, void* to, size_t number, int type, Communicator* all, cudaStream_t) {
    count("collectives");
    size_t share = number * TYPES[type].width;
    return all->exchange(from, share, [&](size_t offset, size_t bytes) {
        for (int rank = 0; rank < all->size; rank++) memcpy((char*)to + rank * share + offset, all->part(rank), bytes);
    });
}
