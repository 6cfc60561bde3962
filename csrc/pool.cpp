#include "pool.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace {

constexpr int IDLE_SPINS = 20000;   // before a worker sleeps: longer than the pause between two calls of a decode step
constexpr int POLITE_SPINS = 50000;  // before a waiting thread lets others have its core: longer than a piece takes
constexpr int NUM_SLOTS = 64;

struct Pool {
    Region slots[NUM_SLOTS];
    std::atomic<uint64_t> epoch{0};  // of the newest region; it lies in slots[epoch % NUM_SLOTS]
    std::vector<std::thread> workers;
    int size = 1;
    std::mutex region;  // one region at a time, whichever thread asks
    std::mutex sleep;
    std::condition_variable wake;
    std::atomic<int> num_sleeping{0};
    std::atomic<bool> ended{false};

    void stop() {
        ended = true;
        announce(epoch + 1);
        for (auto& worker : workers) worker.join();
        workers.clear();
        ended = false;
    }

    void start(int num_threads) {
        stop();
        try {
            for (int i = 1; i < num_threads; i++) workers.emplace_back([this, seen = epoch.load()] { serve(seen); });
        } catch (const std::system_error&) {
            // The system gives no more threads: those that started do the work.
        }
        size = static_cast<int>(workers.size()) + 1;
    }

    void announce(uint64_t newest) {
        epoch.store(newest);
        if (num_sleeping.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep);
            wake.notify_all();
        }
    }

    void serve(uint64_t seen) {
        for (;;) {
            for (int spins = 0; epoch.load(std::memory_order_acquire) == seen;) {
                if (++spins < IDLE_SPINS) {
                    relax();
                    continue;
                }
                std::unique_lock<std::mutex> lock(sleep);
                num_sleeping++;
                wake.wait(lock, [&] { return epoch.load() != seen; });
                num_sleeping--;
            }
            if (ended) return;
            seen = epoch.load();
            Region& slot = slots[seen % NUM_SLOTS];
            // The slot may be given to a newer region at any moment until it knows that someone is in it.
            slot.num_users++;
            if (slot.epoch.load() == seen) {
                Team team(&slot);
                slot.work(team);
            }
            slot.num_users--;
        }
    }
};

Pool& pool() {
    static Pool& instance = *new Pool;  // never destroyed: at the end of the process, threads may still be in it
    return instance;
}

template <class Done>
void spin_until(const Done& done) {
    for (int spins = 0; !done();) {
        if (++spins < POLITE_SPINS)
            relax();
        else
            std::this_thread::yield();
    }
}

}  // namespace

void spin_until_equal(const std::atomic<int>& value, int wanted) {
    spin_until([&] { return value.load(std::memory_order_acquire) == wanted; });
}

void parallel(std::function<void(Team&)> work) {
    Pool& p = pool();
    std::lock_guard<std::mutex> lock(p.region);
    const uint64_t epoch = p.epoch.load() + 1;
    Region& slot = p.slots[epoch % NUM_SLOTS];
    slot.epoch.store(0);  // nobody enters from here on; who is in it leaves without a piece
    spin_until([&] { return slot.num_users.load() == 0; });
    slot.work = std::move(work);
    for (int i = 0; i < MAX_PHASES; i++) slot.next[i].value.store(0), slot.done[i].value.store(0);
    slot.epoch.store(epoch);
    if (p.size > 1) p.announce(epoch);
    else p.epoch.store(epoch);
    Team team(&slot);
    slot.work(team);
}

void set_threads(int num_threads) {
    Pool& p = pool();
    std::lock_guard<std::mutex> lock(p.region);
    p.start(std::max(1, num_threads));
}

int get_threads() { return pool().size; }
