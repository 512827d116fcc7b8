/* A disk that remembers what was not yet synced, and a clock that can be moved.
 *
 * Preloaded into the gateway by `prove`. Every write, truncation, creation and removal below a directory is taken down in a
 * log, with the bytes that were there before; every sync says up to where the log is durable now, and every sync that failed, what will never be. After a kill `prove` reads
 * the log and undoes what a power cut could have undone. Nothing is really synced: the log is what counts.
 *
 * The control page, shared with `prove`, moves the wall clock and makes one chosen call fail.
 *
 * Promises: a record is written before its write, under one lock, so undoing is always right. Memory maps are not seen; the
 * only one is SQLite's -shm, which a restart does not read. Everything outside the directory goes straight through.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum kind { WRITE = 1, TRUNCATE, SYNC, CREATE, SYNC_DIRECTORY, UNLINK, SYNC_FAILED };
enum class { WRITES = 1, SYNCS = 2 };

struct record {
    uint32_t magic, kind, path_length, zero;
    uint64_t offset;   /* of a write; for a sync: the length of the log when it began */
    uint64_t old_size; /* of the file */
    uint64_t old_length, new_length;
};

/* Must equal the layout in prove/disk.rs. */
struct control {
    volatile int64_t clock_nanos;
    volatile int64_t fail_classes, fail_errno, fail_from, fail_count;
    volatile int64_t seen, failed;
};

#define FILES 65536
static char *path_of[FILES];
static char watched[4096];
static size_t watched_length;
static int log_fd = -1;
static uint64_t log_length;
static struct control *control;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static int (*real_open)(const char *, int, ...);
static int (*real_openat)(int, const char *, int, ...);
static int (*real_close)(int);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);
static int (*real_ftruncate)(int, off_t);
static int (*real_unlink)(const char *);
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    real_write = dlsym(RTLD_NEXT, "write");
    real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    real_open = dlsym(RTLD_NEXT, "open64");
    real_openat = dlsym(RTLD_NEXT, "openat64");
    real_close = dlsym(RTLD_NEXT, "close");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_ftruncate = dlsym(RTLD_NEXT, "ftruncate64");
    real_unlink = dlsym(RTLD_NEXT, "unlink");
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *directory = getenv("ONCEHOOK_DISK_DIRECTORY");
    const char *log_path = getenv("ONCEHOOK_DISK_LOG"), *page = getenv("ONCEHOOK_DISK_CONTROL");
    if (!directory || !log_path || !page || strlen(directory) + 2 > sizeof watched) return;
    int page_fd = real_open(page, O_RDWR | O_CLOEXEC);
    void *mapped = page_fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    log_fd = real_open(log_path, O_WRONLY | O_APPEND | O_CLOEXEC);
    /* A test that believes in a disk that is not watched would prove nothing. */
    if (mapped == MAP_FAILED || log_fd < 0) _exit(97);
    control = mapped;
    log_length = lseek(log_fd, 0, SEEK_END);
    strcpy(watched, directory);
    watched_length = strlen(watched);
}

static int is_watched(const char *path) {
    return watched_length && !strncmp(path, watched, watched_length) &&
           (path[watched_length] == '/' || !path[watched_length]);
}

static const char *known(int fd) { return fd >= 0 && fd < FILES ? path_of[fd] : NULL; }

/* Whether this call is the one that fails. */
static int fails(enum class class) {
    if (!control || !(control->fail_classes & class)) return 0;
    int64_t number = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST);
    if (!control->fail_errno || number < control->fail_from || number >= control->fail_from + control->fail_count) return 0;
    __atomic_add_fetch(&control->failed, 1, __ATOMIC_SEQ_CST);
    errno = (int)control->fail_errno;
    return 1;
}

static void put(const void *bytes, size_t length) {
    const char *at = bytes;
    while (length) {
        ssize_t done = real_write(log_fd, at, length);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) _exit(98);
        at += done;
        length -= done;
        log_length += done;
    }
}

/* One record, in one write: a kill leaves it whole or recognisably short. The lock is held. */
static void take_down(struct record head, const char *path, const void *old, const void *new) {
    head.magic = 0x0ce400cd;
    head.path_length = strlen(path);
    size_t length = sizeof head + head.path_length + head.old_length + head.new_length;
    char *whole = malloc(length), *at = whole;
    if (!whole) _exit(98);
    memcpy(at, &head, sizeof head), at += sizeof head;
    memcpy(at, path, head.path_length), at += head.path_length;
    if (head.old_length) memcpy(at, old, head.old_length);
    at += head.old_length;
    if (head.new_length) memcpy(at, new, head.new_length);
    put(whole, length);
    free(whole);
}

static uint64_t size_of(int fd) {
    struct stat status;
    return fstat(fd, &status) ? 0 : (uint64_t)status.st_size;
}

static void before_write(int fd, const char *path, const void *new, size_t length, off_t offset) {
    char *old = malloc(length ? length : 1);
    /* By its number: the file may be open for writing only. */
    ssize_t had = old ? syscall(SYS_pread64, fd, old, length, offset) : -1;
    if (had < 0) {
        int again = real_open(path, O_RDONLY | O_CLOEXEC);
        had = again < 0 ? 0 : syscall(SYS_pread64, again, old, length, offset);
        if (again >= 0) syscall(SYS_close, again);
    }
    struct record head = {.kind = WRITE, .offset = offset, .old_size = size_of(fd), .old_length = had > 0 ? had : 0, .new_length = length};
    take_down(head, path, old, new);
    free(old);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t offset) {
    const char *path = known(fd);
    if (!path) return real_pwrite(fd, bytes, length, offset);
    if (fails(WRITES)) return -1;
    pthread_mutex_lock(&lock);
    before_write(fd, path, bytes, length, offset);
    ssize_t done = real_pwrite(fd, bytes, length, offset);
    pthread_mutex_unlock(&lock);
    return done;
}
ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) { return pwrite64(fd, bytes, length, offset); }

ssize_t write(int fd, const void *bytes, size_t length) {
    const char *path = real_write ? known(fd) : NULL;
    if (!path) return real_write ? real_write(fd, bytes, length) : syscall(SYS_write, fd, bytes, length);
    if (fails(WRITES)) return -1;
    pthread_mutex_lock(&lock);
    before_write(fd, path, bytes, length, lseek(fd, 0, SEEK_CUR));
    ssize_t done = real_write(fd, bytes, length);
    pthread_mutex_unlock(&lock);
    return done;
}

int ftruncate64(int fd, off_t size) {
    const char *path = known(fd);
    if (!path) return real_ftruncate(fd, size);
    if (fails(WRITES)) return -1;
    pthread_mutex_lock(&lock);
    uint64_t was = size_of(fd);
    size_t lost = was > (uint64_t)size ? was - size : 0;
    char *old = malloc(lost ? lost : 1);
    if (lost && (!old || syscall(SYS_pread64, fd, old, lost, size) != (ssize_t)lost)) _exit(98);
    struct record head = {.kind = TRUNCATE, .offset = size, .old_size = was, .old_length = lost};
    take_down(head, path, old, NULL);
    free(old);
    int done = real_ftruncate(fd, size);
    pthread_mutex_unlock(&lock);
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int sync_file(int fd, int (*real)(int)) {
    const char *path = known(fd);
    if (!path) return real(fd);
    int failed = fails(SYNCS), error = errno;
    struct stat status;
    int directory = !fstat(fd, &status) && S_ISDIR(status.st_mode);
    pthread_mutex_lock(&lock);
    /* All under the lock, so what was written before is what is durable now. After a failure it never will be: the kernel
     * takes those pages for clean, and the next sync says nothing about them. */
    struct record head = {.kind = directory ? SYNC_DIRECTORY : failed ? SYNC_FAILED : SYNC, .offset = log_length};
    if (!directory || !failed) take_down(head, path, NULL, NULL);
    pthread_mutex_unlock(&lock);
    errno = error;
    return failed ? -1 : 0;
}
int fsync(int fd) { return sync_file(fd, real_fsync); }
int fdatasync(int fd) { return sync_file(fd, real_fdatasync); }

static int opened(int fd, int flags, int was_there) {
    if (fd < 0 || fd >= FILES || !watched_length) return fd;
    char name[64], path[4096];
    strcpy(name, "/proc/self/fd/");
    char digits[16];
    int at = 15, number = fd;
    digits[at] = 0;
    do digits[--at] = '0' + number % 10; while (number /= 10);
    strcat(name, digits + at);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length <= 0) return fd;
    path[length] = 0;
    pthread_mutex_lock(&lock);
    free(path_of[fd]);
    path_of[fd] = is_watched(path) ? strdup(path) : NULL;
    if (path_of[fd] && flags & O_CREAT && !was_there) take_down((struct record){.kind = CREATE}, path, NULL, NULL);
    pthread_mutex_unlock(&lock);
    return fd;
}

static int is_there(int directory, const char *path) {
    int error = errno, there = !faccessat(directory, path, F_OK, 0);
    errno = error;
    return there;
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    if (!real_open) return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    int was_there = !(flags & O_CREAT) || is_there(AT_FDCWD, path);
    return opened(real_open(path, flags, mode), flags, was_there);
}
int open(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    return open64(path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    if (!real_openat) return syscall(SYS_openat, directory, path, flags, mode);
    int was_there = !(flags & O_CREAT) || is_there(directory, path);
    return opened(real_openat(directory, path, flags, mode), flags, was_there);
}

int close(int fd) {
    if (fd >= 0 && fd < FILES && path_of[fd]) {
        pthread_mutex_lock(&lock);
        free(path_of[fd]);
        path_of[fd] = NULL;
        pthread_mutex_unlock(&lock);
    }
    return real_close ? real_close(fd) : syscall(SYS_close, fd);
}

int unlink(const char *path) {
    char whole[4096];
    if (watched_length && realpath(path, whole) && is_watched(whole)) {
        pthread_mutex_lock(&lock);
        take_down((struct record){.kind = UNLINK}, whole, NULL, NULL);
        pthread_mutex_unlock(&lock);
    }
    return real_unlink(path);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int done = real_clock_gettime ? real_clock_gettime(clock, time) : syscall(SYS_clock_gettime, clock, time);
    if (!done && control && clock == CLOCK_REALTIME && control->clock_nanos) {
        int64_t nanos = time->tv_nsec + control->clock_nanos % 1000000000;
        time->tv_sec += control->clock_nanos / 1000000000 + (nanos >= 1000000000) - (nanos < 0);
        time->tv_nsec = (nanos + 1000000000) % 1000000000;
    }
    return done;
}
