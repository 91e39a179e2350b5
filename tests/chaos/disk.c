/* A disk that fails once, at one operation: loaded into a process before everything else (LD_PRELOAD), see disk.py.

ANYRANK_DISK names a folder. Its file `order` has five lines: the folder that is watched, and what is to fail there: the
operation (- for none), a pattern of paths below that folder, the how-many-th of these, and what happens then (ENOSPC, EIO or
killed). `log` gets a line for each operation that went well, and one for the fault. `count` grows by a byte with each operation
that fits, so that all processes of a job count together. Where the variable is missing nothing happens. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define KILLED -1

/* The system calls themselves: what this library writes for itself must not be watched. */
static long append(const char *folder, const char *name, const char *text) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    syscall(SYS_write, file, text, strlen(text));
    long size = syscall(SYS_lseek, file, 0, SEEK_CUR);
    syscall(SYS_close, file);
    return size;
}

static int read_order(const char *folder, char *text, size_t size, char *lines[5]) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/order", folder);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return 0;
    long length = syscall(SYS_read, file, text, size - 1);
    syscall(SYS_close, file);
    text[length > 0 ? length : 0] = 0;
    for (int number = 0; number < 5; number++)
        if (!(lines[number] = strsep(&text, "\n"))) return 0;
    return 1;
}

static void path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static void whole_path(int folder, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    char above[PATH_MAX] = "";
    if (folder != AT_FDCWD) path_of(folder, above);
    else if (syscall(SYS_getcwd, above, sizeof above) < 0) above[0] = 0;
    if (!strncmp(name, "./", 2)) name += 2;
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", above, name);
}

/* One operation: whether it is to fail, and with what; note() says that it went well. */
typedef struct { const char *folder, *what; char below[PATH_MAX]; } Operation;

static int due(Operation *one, const char *what, const char *path) {
    int kept = errno, result = 0;
    char text[2 * PATH_MAX], line[PATH_MAX + 64], *lines[5];
    one->what = what;
    one->folder = getenv("ANYRANK_DISK");
    if (!one->folder || !path[0] || !read_order(one->folder, text, sizeof text, lines)) {
        one->folder = NULL;
        return 0;
    }
    size_t length = strlen(lines[0]);
    if (strncmp(path, lines[0], length) || path[length] != '/') {
        one->folder = NULL;
        return 0;
    }
    snprintf(one->below, sizeof one->below, "%s", path + length + 1);
    if (!strcmp(lines[1], what) && !fnmatch(lines[2], one->below, 0)
        && append(one->folder, "count", ".") == atol(lines[3])) {
        snprintf(line, sizeof line, "FAULT %s %.4000s\n", what, one->below);
        append(one->folder, "log", line);
        result = !strcmp(lines[4], "ENOSPC") ? ENOSPC : !strcmp(lines[4], "EIO") ? EIO : KILLED;
    }
    errno = kept;
    return result;
}

static void note(const Operation *one) {
    if (!one->folder) return;
    int kept = errno;
    char line[PATH_MAX + 64];
    snprintf(line, sizeof line, "%s %.4000s\n", one->what, one->below);
    append(one->folder, "log", line);
    errno = kept;
}

static int fail(int fault) {
    if (fault == KILLED) {
        syscall(SYS_kill, getpid(), SIGKILL);
        pause();
    }
    errno = fault;
    return -1;
}

/* DO: the operation itself, an expression with a result below 0 where it fails. */
#define WATCHED(WHAT, PATH, DO) \
    Operation one; \
    int fault = due(&one, WHAT, PATH); \
    if (fault) return fail(fault); \
    __auto_type result = DO; \
    if (result >= 0) note(&one); \
    return result

/* Half of the bytes get there before EIO or the kill; a full disk takes none. */
#define WRITTEN(FILE, HALF, DO) \
    char path[PATH_MAX]; \
    path_of(FILE, path); \
    Operation one; \
    int fault = due(&one, "write", path); \
    if (fault && fault != ENOSPC) (void)!(HALF); \
    if (fault) return fail(fault); \
    __auto_type result = DO; \
    if (result >= 0) note(&one); \
    return result

ssize_t write(int file, const void *bytes, size_t size) {
    WRITTEN(file, syscall(SYS_write, file, bytes, size / 2), syscall(SYS_write, file, bytes, size));
}
ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) {
    WRITTEN(file, NEXT(pwrite)(file, bytes, size / 2, at), NEXT(pwrite)(file, bytes, size, at));
}
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
    WRITTEN(file, NEXT(pwrite64)(file, bytes, size / 2, at), NEXT(pwrite64)(file, bytes, size, at));
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    WRITTEN(file, NEXT(writev)(file, parts, count / 2), NEXT(writev)(file, parts, count));
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    WRITTEN(to, 0, syscall(SYS_sendfile, to, from, at, size));
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    WRITTEN(to, 0, syscall(SYS_sendfile, to, from, at, size));
}
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *where, size_t size, unsigned flags) {
    WRITTEN(to, 0, syscall(SYS_copy_file_range, from, at, to, where, size, flags));
}

#define ON_FILE(FILE, WHAT, DO) \
    char path[PATH_MAX]; \
    path_of(FILE, path); \
    WATCHED(WHAT, path, DO)

int fsync(int file) { ON_FILE(file, "fsync", NEXT(fsync)(file)); }
int fdatasync(int file) { ON_FILE(file, "fsync", NEXT(fdatasync)(file)); }
int ftruncate(int file, off_t size) { ON_FILE(file, "truncate", NEXT(ftruncate)(file, size)); }
int ftruncate64(int file, off64_t size) { ON_FILE(file, "truncate", NEXT(ftruncate64)(file, size)); }

#define ON_NAME(FOLDER, NAME, WHAT, DO) \
    char path[PATH_MAX]; \
    whole_path(FOLDER, NAME, path); \
    WATCHED(WHAT, path, DO)

int rename(const char *from, const char *to) { ON_NAME(AT_FDCWD, to, "rename", NEXT(rename)(from, to)); }
int renameat(int in, const char *from, int out, const char *to) {
    ON_NAME(out, to, "rename", NEXT(renameat)(in, from, out, to));
}
int renameat2(int in, const char *from, int out, const char *to, unsigned flags) {
    ON_NAME(out, to, "rename", NEXT(renameat2)(in, from, out, to, flags));
}
int unlink(const char *name) { ON_NAME(AT_FDCWD, name, "unlink", NEXT(unlink)(name)); }
int unlinkat(int folder, const char *name, int flags) {
    ON_NAME(folder, name, "unlink", NEXT(unlinkat)(folder, name, flags));
}
int mkdir(const char *name, mode_t mode) { ON_NAME(AT_FDCWD, name, "mkdir", NEXT(mkdir)(name, mode)); }

/* Opening to read is not watched. */
#define OPENED(FOLDER, NAME, DO) \
    va_list more; \
    va_start(more, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    if ((flags & O_ACCMODE) == O_RDONLY) return DO; \
    ON_NAME(FOLDER, NAME, "open", DO)

int open(const char *name, int flags, ...) { OPENED(AT_FDCWD, name, NEXT(open)(name, flags, mode)); }
int open64(const char *name, int flags, ...) { OPENED(AT_FDCWD, name, NEXT(open64)(name, flags, mode)); }
int openat(int folder, const char *name, int flags, ...) { OPENED(folder, name, NEXT(openat)(folder, name, flags, mode)); }
int openat64(int folder, const char *name, int flags, ...) {
    OPENED(folder, name, NEXT(openat64)(folder, name, flags, mode));
}
