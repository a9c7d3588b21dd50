/* Helper threads beside the calling thread. They are started by the first call that wants them.
 *
 * A task is units that any thread claims one after another; the caller claims as well. So a helper that sleeps, or that
 * the system does not run, delays nothing that it has not claimed. A helper without work watches for the next task for
 * SPIN_NS, which is longer than the time between the calls of one ranking or between two layers of a prefill, and then
 * sleeps. Which thread does which unit changes no result.
 */
#include "team.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

enum {
    MOST_HELPERS = 255,
    SPIN_NS = 200000,
    LOOKS = 32 /* between two looks at the clock */
};

static struct {
    _Alignas(LINE) _Atomic uint64_t open; /* the task's number << 32 | units that nobody has claimed */
    _Alignas(LINE) _Atomic uint32_t undone; /* units of the task */
    _Alignas(LINE) _Atomic uint32_t posted; /* the task's number: what helpers watch and sleep on */
    _Atomic uint32_t sleeping;              /* helpers that do not watch */
    _Atomic int64_t wanted;                 /* helpers that the present call may use */
    _Atomic int ended;                      /* the process ends: helpers return */
    void (*run)(const void *of, int64_t unit); /* both are the posted task's while one of its units is undone */
    const void *of;
    atomic_flag taken; /* by a call; what follows is the taker's */
    int64_t helpers;
    pthread_t threads[MOST_HELPERS];
} team = {.taken = ATOMIC_FLAG_INIT};

static void futex(int operation, uint32_t value) {
    syscall(SYS_futex, &team.posted, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Does units of the task while there are unclaimed ones. */
static void work_on(uint32_t task) {
    uint64_t open = atomic_load_explicit(&team.open, memory_order_acquire);
    while (open >> 32 == task && (uint32_t)open)
        if (atomic_compare_exchange_weak_explicit(
                &team.open, &open, open - 1, memory_order_acq_rel, memory_order_acquire
            )) {
            team.run(team.of, (int64_t)(uint32_t)open - 1);
            atomic_fetch_sub_explicit(&team.undone, 1, memory_order_release);
            open = atomic_load_explicit(&team.open, memory_order_acquire);
        }
}

/* Waits until another task than `last` is posted; returns its number. */
static uint32_t await_task(uint32_t last) {
    int64_t until = now_ns() + SPIN_NS;
    uint32_t posted;
    for (int looks = 0; (posted = atomic_load_explicit(&team.posted, memory_order_acquire)) == last; looks++) {
        _mm_pause();
        if (looks % LOOKS || now_ns() < until) continue;
        atomic_fetch_add(&team.sleeping, 1);
        futex(FUTEX_WAIT, last); /* returns at once if a task was posted meanwhile */
        atomic_fetch_sub(&team.sleeping, 1);
    }
    return posted;
}

static void *help(void *index) {
    prctl(PR_SET_NAME, "relaygr-kernels");
    for (uint32_t task = atomic_load(&team.posted);; task = await_task(task)) {
        if (atomic_load(&team.ended)) return NULL;
        if ((intptr_t)index >= atomic_load_explicit(&team.wanted, memory_order_relaxed)) continue;
        Before before;
        enter(&before);
        work_on(task);
        leave(&before);
    }
}

/* A forked process has none of the threads. */
static void forget_helpers(void) {
    team.helpers = 0;
    atomic_store(&team.sleeping, 0);
    atomic_flag_clear(&team.taken);
}

__attribute__((constructor)) static void prepare_team(void) { pthread_atfork(NULL, NULL, forget_helpers); }

__attribute__((destructor)) static void end_team(void) {
    if (atomic_flag_test_and_set(&team.taken)) return; /* a call runs while the process ends, which ends the helpers */
    atomic_store(&team.ended, 1);
    atomic_fetch_add(&team.posted, 1);
    futex(FUTEX_WAKE, INT32_MAX);
    while (team.helpers) pthread_join(team.threads[--team.helpers], NULL);
}

/* Starts helpers until there are `count`, or until the system refuses. Signals go to the process's other threads. */
static void start_helpers(int64_t count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team.helpers < count &&
           !pthread_create(team.threads + team.helpers, NULL, help, (void *)(intptr_t)team.helpers))
        team.helpers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

int64_t team_enter(int64_t threads) {
    int64_t helpers = least(threads - 1, MOST_HELPERS);
    if (helpers < 1 || atomic_flag_test_and_set(&team.taken)) return 1;
    if (team.helpers < helpers) start_helpers(helpers);
    helpers = least(helpers, team.helpers);
    atomic_store_explicit(&team.wanted, helpers, memory_order_relaxed);
    if (!helpers) atomic_flag_clear(&team.taken);
    return 1 + helpers;
}

void team_leave(int64_t parts) {
    if (parts > 1) atomic_flag_clear(&team.taken);
}

void team_run(int64_t parts, int64_t units, void (*run)(const void *of, int64_t unit), const void *of) {
    if (parts == 1 || units == 1) {
        for (int64_t unit = 0; unit < units; unit++) run(of, unit);
        return;
    }
    uint32_t task = atomic_load_explicit(&team.posted, memory_order_relaxed) + 1;
    team.run = run, team.of = of;
    atomic_store_explicit(&team.undone, (uint32_t)units, memory_order_relaxed);
    atomic_store_explicit(&team.open, (uint64_t)task << 32 | (uint32_t)units, memory_order_release);
    atomic_store(&team.posted, task);
    if (atomic_load(&team.sleeping)) futex(FUTEX_WAKE, INT32_MAX);
    work_on(task);
    int64_t until = now_ns() + SPIN_NS;
    for (int looks = 0; atomic_load_explicit(&team.undone, memory_order_acquire); looks++) {
        _mm_pause();
        if (looks % LOOKS == 0 && now_ns() > until) sched_yield(); /* the helper may wait for this processor */
    }
}
