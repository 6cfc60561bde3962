// A team of threads for work in phases. Within a phase, pieces are taken by whoever is free; a phase is over when its last
// piece is done. So a thread that the system took away is waited for only if it holds a piece, and cores of unequal
// speed share the work fairly. Which thread does a piece never shows in its result.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

constexpr int MAX_PHASES = 8;

class Team;

struct alignas(64) Counter {  // on a cache line of its own: others spin on its neighbours
    std::atomic<int> value{0};
};

struct Region {  // one call of `parallel`; slots are used again, see pool.cpp
    std::atomic<uint64_t> epoch{0};
    std::atomic<int> num_users{0};
    std::function<void(Team&)> work;
    Counter next[MAX_PHASES], done[MAX_PHASES];
};

void spin_until_equal(const std::atomic<int>& value, int wanted);

class Team {  // one thread's view of a region
   public:
    explicit Team(Region* region) : region_(region) {}

    // The next phase: piece(i) for i in [0, total), each once; all threads come here in the same order of phases.
    template <class Piece>
    void run(int total, const Piece& piece) {
        std::atomic<int>&next = region_->next[phase_].value, &done = region_->done[phase_].value;
        phase_++;
        int num_done = 0;
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total; num_done++) piece(i);
        if (num_done) done.fetch_add(num_done, std::memory_order_acq_rel);
        spin_until_equal(done, total);
    }

   private:
    Region* region_;
    int phase_ = 0;
};

// Runs `work` on this thread and on those of the pool that come in time; returns when all phases are done. A late thread
// may still walk through `work` then, without getting a piece: outside of its pieces, `work` must touch nothing but
// what it holds by value.
void parallel(std::function<void(Team&)> work);
void set_threads(int num_threads);
int get_threads();
