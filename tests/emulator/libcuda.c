/* A CUDA driver without a GPU, for tests: device memory is memory of the kernel (memfd).
 *
 * What is emulated as documented, or as driver 580 does it where nothing is documented
 * (`tools/gpu/check_driver.py` asks a real one): devices with UUIDs and a memory size, physical memory with POSIX
 * descriptors that other processes can import, reserved addresses, mappings at fixed addresses,
 * access rights, streams that work on threads of their own, events, page-locked host memory,
 * kernels that were compiled for the host, and the checkpoint of other processes with its states.
 *
 * Settings, in $SNAPAGENT_EMULATED_CUDA: words "name=value", separated by commas.
 *   devices=1      how many
 *   memory=268435456   bytes of each
 *   seed=1         makes the UUIDs: device 3 of seed 7 is 00000007-0000-...-000000000003
 *   version=13000  what cuDriverGetVersion says
 *   model=0        devices of another number have another name
 *   delay_us=0     how long each operation of a stream waits first, so that what should have been
 *                  waited for and was not is found
 *
 * A kernel image is the text "EMULATED-CUDA:" and the path of a shared object; see emulated_cuda.h.
 * How much memory of a device is used is counted over all processes: by the kernel's own list of
 * who has such memory open or mapped. So memory counts for as long as anybody has it, as on a GPU.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "emulated_cuda.h"

#define API __attribute__((visibility("default")))
#define GRANULARITY (2ul << 20)
#define DEVICES_MAX 16
#define TABLE_MAX 65536
#define NAME_PREFIX "emulated-cuda-memory-"
#define STATE_NAME "emulated-cuda-state"
#define IMAGE_PREFIX "EMULATED-CUDA:"

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, OPERATING_SYSTEM = 304, INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
  HOST_MEMORY_ALREADY_REGISTERED = 712, HOST_MEMORY_NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
  UNKNOWN = 999
};
static const struct { int code; const char *name; } error_names[] = {
  {SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
  {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
  {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
  {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
  {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"},
  {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE"},
  {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"}, {NOT_READY, "CUDA_ERROR_NOT_READY"},
  {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
  {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
  {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
  {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"}, {UNKNOWN, "CUDA_ERROR_UNKNOWN"},
};

/* What other processes may look at and change: a page of memory in a file, found by its name. */
enum { RUNNING = 0, LOCKED = 1, CHECKPOINTED = 2, FAILED = 3 };
typedef struct { unsigned char bytes[16]; } Uuid;
typedef struct {
  _Atomic int state;
  _Atomic int inside;          /* calls under way */
  _Atomic int pending;         /* operations that no stream has done yet */
  _Atomic int imported_mapped; /* mappings of memory that another process made */
  _Atomic int opened;          /* the same, by CUDA IPC */
  int tid;
  int device_count;
  Uuid uuids[DEVICES_MAX];
  _Atomic uint64_t counters[COUNTERS];
} Shared;

typedef struct { bool used; int fd, refs, ordinal; size_t length; bool imported, exportable; } Physical;
typedef struct { bool used; uint64_t start; size_t length; } Reservation;
typedef struct {
  bool used, readable, imported, legacy, opened;
  uint64_t start;
  size_t length;
  int ordinal;
} Mapping;
typedef struct { bool used, ours; uintptr_t start; size_t length; } Host;
typedef struct Context { int ordinal, refs; } Context;

typedef struct Event {
  pthread_mutex_t lock;
  pthread_cond_t done;
  uint64_t recorded, completed;
} Event;

typedef enum { COPY_IN, COPY_OUT, COPY_WITHIN, SET, LAUNCH, RECORD, WAIT } Kind;
typedef struct Operation {
  struct Operation *next;
  Kind kind;
  uint64_t to, from;
  size_t length;
  unsigned char value;
  void *staged;
  Event *event;
  uint64_t ticket;
  EmulatedKernel kernel;
  EmulatedLaunch launch;
  void **arguments;
} Operation;

typedef struct Stream {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  Operation *first, *last;
  int queued;
  bool ending;
  Context *context;
  struct Stream *next;
} Stream;

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static Shared *shared;
static int shared_fd = -1;
static pid_t initialised_by;
static struct { int devices, version, model, delay_us; uint64_t memory; unsigned seed; } settings;
static Physical physicals[TABLE_MAX];
static Reservation reservations[TABLE_MAX];
static Mapping mappings[TABLE_MAX];
static Host hosts[TABLE_MAX];
static int physicals_end, reservations_end, mappings_end, hosts_end;
static Context contexts[DEVICES_MAX];
static Stream *streams;
static Stream *default_streams[DEVICES_MAX];
static _Atomic int sticky;
static __thread Context *current;
static __thread Context *stack[16];
static __thread int stack_depth;

static void count(int which, uint64_t by) {
  if (shared) atomic_fetch_add(&shared->counters[which], by);
}

static int64_t now_us(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1000000ll + at.tv_nsec / 1000;
}

/* -- calls: none while another process has locked this one ------------------------------------- */

static CUresult enter(bool needs_context) {
  if (!shared || initialised_by != getpid()) return NOT_INITIALIZED;
  for (;;) {
    atomic_fetch_add(&shared->inside, 1);
    if (atomic_load(&shared->state) == RUNNING) break;
    atomic_fetch_sub(&shared->inside, 1);
    usleep(200);
  }
  int failed = atomic_load(&sticky);
  if (failed) { atomic_fetch_sub(&shared->inside, 1); return failed; }
  if (needs_context && (!current || !current->refs)) {
    atomic_fetch_sub(&shared->inside, 1);
    return INVALID_CONTEXT;
  }
  return SUCCESS;
}

static CUresult leave(CUresult result) {
  atomic_fetch_sub(&shared->inside, 1);
  return result;
}

#define ENTER(needs_context) \
  do { CUresult entered = enter(needs_context); if (entered) return entered; } while (0)

/* -- settings ---------------------------------------------------------------------------------- */

static void read_settings(void) {
  settings.devices = 1;
  settings.version = 13000;
  settings.memory = 256ul << 20;
  settings.seed = 1;
  const char *given = getenv("SNAPAGENT_EMULATED_CUDA");
  char *copy = strdup(given ? given : ""), *rest = copy, *word;
  while ((word = strsep(&rest, ",")) != NULL) {
    char *value = strchr(word, '=');
    if (!value) continue;
    *value++ = 0;
    uint64_t number = strtoull(value, NULL, 0);
    if (!strcmp(word, "devices")) settings.devices = number > DEVICES_MAX ? DEVICES_MAX : number;
    if (!strcmp(word, "memory")) settings.memory = number;
    if (!strcmp(word, "seed")) settings.seed = number;
    if (!strcmp(word, "version")) settings.version = number;
    if (!strcmp(word, "model")) settings.model = number;
    if (!strcmp(word, "delay_us")) settings.delay_us = number;
  }
  free(copy);
}

static void make_uuid(Uuid *uuid, int ordinal) {
  memset(uuid, 0, sizeof *uuid);
  for (int i = 0; i < 4; i++) uuid->bytes[i] = settings.seed >> (24 - 8 * i);
  uuid->bytes[15] = ordinal;
}

API CUresult cuInit(unsigned flags) {
  if (flags) return INVALID_VALUE;
  pthread_mutex_lock(&table_lock);
  if (!shared) {
    read_settings();
    int fd = memfd_create(STATE_NAME, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 4096) < 0) { pthread_mutex_unlock(&table_lock); return UNKNOWN; }
    Shared *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    page->tid = gettid();
    page->device_count = settings.devices;
    for (int i = 0; i < settings.devices; i++) make_uuid(&page->uuids[i], i);
    shared_fd = fd;
    shared = page;
    initialised_by = getpid();
  }
  pthread_mutex_unlock(&table_lock);
  /* A child of fork cannot use what its parent has initialised. */
  return initialised_by == getpid() ? SUCCESS : NOT_INITIALIZED;
}

API CUresult cuDriverGetVersion(int *version) {
  if (!shared) read_settings();
  *version = settings.version;
  return SUCCESS;
}

API CUresult cuGetErrorName(int code, const char **name) {
  for (size_t i = 0; i < sizeof error_names / sizeof *error_names; i++)
    if (error_names[i].code == code) { *name = error_names[i].name; return SUCCESS; }
  *name = NULL;
  return INVALID_VALUE;
}

/* -- devices ----------------------------------------------------------------------------------- */

static bool is_device(int ordinal) { return ordinal >= 0 && ordinal < shared->device_count; }

API CUresult cuDeviceGetCount(int *found) {
  ENTER(false);
  *found = shared->device_count;
  return leave(SUCCESS);
}

API CUresult cuDeviceGet(int *device, int ordinal) {
  ENTER(false);
  if (!is_device(ordinal)) return leave(INVALID_DEVICE);
  *device = ordinal;
  return leave(SUCCESS);
}

API CUresult cuDeviceGetUuid_v2(Uuid *uuid, int device) {
  ENTER(false);
  if (!is_device(device)) return leave(INVALID_DEVICE);
  *uuid = shared->uuids[device];
  return leave(SUCCESS);
}

API CUresult cuDeviceGetName(char *name, int length, int device) {
  ENTER(false);
  if (!is_device(device)) return leave(INVALID_DEVICE);
  snprintf(name, length, "Emulated GPU %d", settings.model);
  return leave(SUCCESS);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER(false);
  if (!is_device(device)) return leave(INVALID_DEVICE);
  switch (attribute) {
    case 75: *value = 9; break;                /* compute capability, major */
    case 76: *value = 0; break;                /* minor */
    case 16: *value = 2; break;                /* multiprocessors */
    case 40: *value = 2; break;                /* copy engines */
    case 102: case 103: *value = 1; break;     /* virtual memory management, POSIX descriptors */
    default: *value = 0;
  }
  return leave(SUCCESS);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
  ENTER(false);
  if (!is_device(device)) return leave(INVALID_DEVICE);
  *bytes = settings.memory;
  return leave(SUCCESS);
}

API CUresult cuDeviceGetPCIBusId(char *id, int length, int device) {
  ENTER(false);
  if (!is_device(device)) return leave(INVALID_DEVICE);
  snprintf(id, length, "EEEE:%02X:00.0", device);
  return leave(SUCCESS);
}

/* -- contexts ---------------------------------------------------------------------------------- */

API CUresult cuDevicePrimaryCtxRetain(Context **context, int device) {
  ENTER(false);
  if (!is_device(device)) return leave(INVALID_DEVICE);
  pthread_mutex_lock(&table_lock);
  contexts[device].ordinal = device;
  contexts[device].refs++;
  *context = &contexts[device];
  pthread_mutex_unlock(&table_lock);
  return leave(SUCCESS);
}

API CUresult cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER(false);
  if (!is_device(device)) return leave(INVALID_DEVICE);
  pthread_mutex_lock(&table_lock);
  bool had = contexts[device].refs > 0;
  if (had) contexts[device].refs--;
  pthread_mutex_unlock(&table_lock);
  return leave(had ? SUCCESS : INVALID_CONTEXT);
}

API CUresult cuCtxSetCurrent(Context *context) {
  ENTER(false);
  if (context && !context->refs) return leave(INVALID_CONTEXT);
  current = context;
  return leave(SUCCESS);
}

API CUresult cuCtxGetCurrent(Context **context) {
  ENTER(false);
  *context = current;
  return leave(SUCCESS);
}

API CUresult cuCtxPushCurrent_v2(Context *context) {
  ENTER(false);
  if (!context || !context->refs || stack_depth == 16) return leave(INVALID_CONTEXT);
  stack[stack_depth++] = current;
  current = context;
  return leave(SUCCESS);
}

API CUresult cuCtxPopCurrent_v2(Context **context) {
  ENTER(true);
  *context = current;
  current = stack_depth ? stack[--stack_depth] : NULL;
  return leave(SUCCESS);
}

/* -- how much of a device is used, by whomever ------------------------------------------------- */

typedef struct { uint64_t inode, length; } Seen;
typedef struct { Seen *all; int found, room; char prefix[64]; } Census;

static void see(Census *census, uint64_t inode, uint64_t length) {
  for (int i = 0; i < census->found; i++) if (census->all[i].inode == inode) return;
  if (census->found == census->room) {
    census->room = census->room ? 2 * census->room : 64;
    census->all = realloc(census->all, census->room * sizeof(Seen));
  }
  census->all[census->found++] = (Seen){inode, length};
}

static void name_prefix(char *into, size_t room, const Uuid *uuid) {
  int at = snprintf(into, room, NAME_PREFIX);
  for (int i = 0; i < 16; i++) at += snprintf(into + at, room - at, "%02x", uuid->bytes[i]);
}

static void see_open(Census *census, const char *pid) {
  char path[320], link[128];
  snprintf(path, sizeof path, "/proc/%s/fd", pid);
  DIR *dir = opendir(path);
  if (!dir) return;
  for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
    snprintf(path, sizeof path, "/proc/%s/fd/%s", pid, entry->d_name);
    ssize_t length = readlink(path, link, sizeof link - 1);
    if (length <= 7) continue;
    link[length] = 0;
    struct stat found;
    if (strncmp(link, "/memfd:", 7) || strncmp(link + 7, census->prefix, strlen(census->prefix)))
      continue;
    if (!stat(path, &found)) see(census, found.st_ino, found.st_size);
  }
  closedir(dir);
}

static void see_mapped(Census *census, const char *pid) {
  char path[64], *line = NULL;
  size_t room = 0;
  snprintf(path, sizeof path, "/proc/%s/maps", pid);
  FILE *maps = fopen(path, "re");
  if (!maps) return;
  while (getline(&line, &room, maps) > 0) {
    char *name = strstr(line, "/memfd:");
    unsigned long start, end, inode, offset;
    if (!name || strncmp(name + 7, census->prefix, strlen(census->prefix))) continue;
    if (sscanf(line, "%lx-%lx %*s %lx %*s %lu", &start, &end, &offset, &inode) != 4) continue;
    char *size = strstr(name, "-size-"); /* part of the name, since a mapping may be a part of it */
    see(census, inode, size ? strtoull(size + 6, NULL, 10) : end - start);
  }
  free(line);
  fclose(maps);
}

static uint64_t used_bytes(int ordinal) {
  Census census = {0};
  name_prefix(census.prefix, sizeof census.prefix, &shared->uuids[ordinal]);
  DIR *proc = opendir("/proc");
  if (!proc) return 0;
  for (struct dirent *entry; (entry = readdir(proc)) != NULL;)
    if (isdigit((unsigned char)entry->d_name[0])) {
      see_open(&census, entry->d_name);
      see_mapped(&census, entry->d_name);
    }
  closedir(proc);
  uint64_t sum = 0;
  for (int i = 0; i < census.found; i++) sum += census.all[i].length;
  free(census.all);
  return sum;
}

API CUresult cuMemGetInfo_v2(size_t *free_now, size_t *total) {
  ENTER(true);
  uint64_t used = used_bytes(current->ordinal);
  *total = settings.memory;
  *free_now = used < settings.memory ? settings.memory - used : 0;
  return leave(SUCCESS);
}

/* -- physical memory --------------------------------------------------------------------------- */

typedef struct { int type, id; } Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *win32;
  unsigned char flags[8];
} Properties;
typedef struct { Location location; int flags; } Access;

static bool is_device_memory(const Properties *wanted) {
  return wanted && wanted->type == 1 && wanted->location.type == 1;
}

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const Properties *wanted, int option) {
  ENTER(false);
  if (!is_device_memory(wanted) || option < 0 || option > 1) return leave(INVALID_VALUE);
  if (!is_device(wanted->location.id)) return leave(INVALID_DEVICE);
  *bytes = GRANULARITY;
  return leave(SUCCESS);
}

/* Slots are numbered from 1; 0 if the table is full. */
static uint64_t new_physical(void) {
  for (int i = 0; i < TABLE_MAX; i++)
    if (!physicals[i].used) {
      if (i >= physicals_end) physicals_end = i + 1;
      return i + 1;
    }
  return 0;
}

static Physical *physical_of(uint64_t handle) {
  if (!handle || handle > (uint64_t)physicals_end || !physicals[handle - 1].used) return NULL;
  return &physicals[handle - 1];
}

static int make_memory(int ordinal, size_t length) {
  if (used_bytes(ordinal) + length > settings.memory) return -1;
  char name[128];
  name_prefix(name, sizeof name, &shared->uuids[ordinal]);
  snprintf(name + strlen(name), sizeof name - strlen(name), "-size-%zu", length);
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0 && ftruncate(fd, length) < 0) { close(fd); fd = -1; }
  return fd;
}

API CUresult cuMemCreate(uint64_t *handle, size_t length, const Properties *wanted, uint64_t flags) {
  ENTER(false);
  if (!is_device_memory(wanted) || flags || !length || length % GRANULARITY)
    return leave(INVALID_VALUE);
  if (!is_device(wanted->location.id)) return leave(INVALID_DEVICE);
  pthread_mutex_lock(&table_lock);
  CUresult result = OUT_OF_MEMORY;
  uint64_t slot = new_physical();
  int fd = slot ? make_memory(wanted->location.id, length) : -1;
  if (fd >= 0) {
    physicals[slot - 1] = (Physical){true, fd, 1, wanted->location.id, length, false,
                                     (wanted->handle_types & 1) != 0};
    *handle = slot;
    result = SUCCESS;
    count(CREATES, 1);
  }
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

API CUresult cuMemRelease(uint64_t handle) {
  ENTER(false);
  pthread_mutex_lock(&table_lock);
  Physical *one = physical_of(handle);
  if (one && --one->refs == 0) { close(one->fd); one->used = false; }
  pthread_mutex_unlock(&table_lock);
  return leave(one ? SUCCESS : INVALID_VALUE);
}

API CUresult cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, uint64_t flags) {
  ENTER(false);
  pthread_mutex_lock(&table_lock);
  Physical *one = physical_of(handle);
  CUresult result = !one || type != 1 || flags ? INVALID_VALUE : SUCCESS;
  if (!result && !one->exportable) result = NOT_SUPPORTED;
  if (!result && (*fd = fcntl(one->fd, F_DUPFD_CLOEXEC, 0)) < 0) result = UNKNOWN;
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

static int ordinal_of_memory(int fd) {
  char path[64], link[128], prefix[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(path, link, sizeof link - 1);
  if (length < 0) return -1;
  link[length] = 0;
  for (int i = 0; i < shared->device_count; i++) {
    name_prefix(prefix, sizeof prefix, &shared->uuids[i]);
    if (!strncmp(link, "/memfd:", 7) && !strncmp(link + 7, prefix, strlen(prefix))) return i;
  }
  return -1;
}

API CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type) {
  ENTER(false);
  int fd = (int)(intptr_t)os_handle, ordinal = type == 1 ? ordinal_of_memory(fd) : -1;
  struct stat found;
  if (ordinal < 0 || fstat(fd, &found) < 0) return leave(UNKNOWN);
  pthread_mutex_lock(&table_lock);
  uint64_t slot = new_physical();
  int own = slot ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
  if (own >= 0) {
    physicals[slot - 1] = (Physical){true, own, 1, ordinal, found.st_size, true, true};
    *handle = slot;
  }
  pthread_mutex_unlock(&table_lock);
  return leave(own >= 0 ? SUCCESS : UNKNOWN);
}

API CUresult cuMemGetAllocationPropertiesFromHandle(Properties *found, uint64_t handle) {
  ENTER(false);
  pthread_mutex_lock(&table_lock);
  Physical *one = physical_of(handle);
  if (one) {
    memset(found, 0, sizeof *found);
    found->type = 1;
    found->handle_types = one->exportable;
    found->location = (Location){1, one->ordinal};
  }
  pthread_mutex_unlock(&table_lock);
  return leave(one ? SUCCESS : INVALID_VALUE);
}

/* -- addresses and mappings -------------------------------------------------------------------- */

static void *place(uint64_t address, size_t length, int protection, int flags, int fd) {
  return mmap((void *)address, length, protection, flags, fd, 0);
}

static uint64_t place_nowhere(uint64_t wanted, size_t length) {
  static uint64_t next = 0x300000000000;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (wanted && place(wanted, length, PROT_NONE, flags, -1) == (void *)wanted) return wanted;
  for (int tries = 0; tries < 4096; tries++) {
    uint64_t at = next;
    next += length;
    if (place(at, length, PROT_NONE, flags, -1) == (void *)at) return at;
  }
  return 0;
}

API CUresult cuMemAddressReserve(uint64_t *start, size_t length, size_t alignment, uint64_t wanted,
                                 uint64_t flags) {
  ENTER(false);
  if (!length || length % GRANULARITY || alignment & (alignment - 1) || flags || wanted % 4096)
    return leave(INVALID_VALUE);
  pthread_mutex_lock(&table_lock);
  CUresult result = OUT_OF_MEMORY;
  for (int i = 0; i < TABLE_MAX && result; i++)
    if (!reservations[i].used) {
      uint64_t at = place_nowhere(wanted % GRANULARITY ? 0 : wanted, length);
      if (!at) break;
      reservations[i] = (Reservation){true, at, length};
      if (i >= reservations_end) reservations_end = i + 1;
      *start = at;
      result = SUCCESS;
    }
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

static bool overlaps(uint64_t start, size_t length, uint64_t other, size_t other_length) {
  return start < other + other_length && other < start + length;
}

API CUresult cuMemAddressFree(uint64_t start, size_t length) {
  ENTER(false);
  pthread_mutex_lock(&table_lock);
  CUresult result = INVALID_VALUE;
  for (int i = 0; i < reservations_end; i++)
    if (reservations[i].used && reservations[i].start == start && reservations[i].length == length) {
      bool mapped = false;
      for (int j = 0; j < mappings_end; j++)
        mapped |= mappings[j].used && overlaps(start, length, mappings[j].start, mappings[j].length);
      if (mapped) break;
      munmap((void *)start, length);
      reservations[i].used = false;
      result = SUCCESS;
    }
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

static bool is_reserved(uint64_t start, size_t length) {
  bool reserved = false;
  for (int i = 0; i < reservations_end; i++)
    reserved |= reservations[i].used && reservations[i].start <= start &&
                start + length <= reservations[i].start + reservations[i].length;
  return reserved;
}

static CUresult map_locked(uint64_t start, size_t length, Physical *one, bool legacy) {
  if (!is_reserved(start, length)) return INVALID_VALUE;
  int slot = -1;
  for (int i = 0; i < TABLE_MAX; i++) {
    if (i < mappings_end && mappings[i].used) {
      if (overlaps(start, length, mappings[i].start, mappings[i].length)) return INVALID_VALUE;
    } else if (slot < 0) {
      slot = i;
    }
    if (i >= mappings_end && slot >= 0) break;
  }
  if (slot < 0) return OUT_OF_MEMORY;
  if (place(start, length, PROT_NONE, MAP_SHARED | MAP_FIXED, one->fd) == MAP_FAILED) return UNKNOWN;
  mappings[slot] = (Mapping){true, false, one->imported, legacy, false, start, length, one->ordinal};
  if (slot >= mappings_end) mappings_end = slot + 1;
  if (one->imported) atomic_fetch_add(&shared->imported_mapped, 1);
  return SUCCESS;
}

API CUresult cuMemMap(uint64_t start, size_t length, size_t offset, uint64_t handle, uint64_t flags) {
  ENTER(false);
  if (!length || (start | length) % GRANULARITY || offset || flags) return leave(INVALID_VALUE);
  pthread_mutex_lock(&table_lock);
  Physical *one = physical_of(handle);
  CUresult result = INVALID_VALUE;
  if (one && length < one->length) result = NOT_SUPPORTED;
  if (one && length == one->length) result = map_locked(start, length, one, false);
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

/* Whole mappings in a range; they may leave gaps. */
static bool are_whole(uint64_t start, size_t length) {
  for (int i = 0; i < mappings_end; i++)
    if (mappings[i].used && overlaps(start, length, mappings[i].start, mappings[i].length) &&
        (mappings[i].start < start || mappings[i].start + mappings[i].length > start + length))
      return false;
  return true;
}

/* Whole mappings that fill a range without gaps. */
static bool fills(uint64_t start, size_t length) {
  uint64_t covered = 0;
  for (int i = 0; i < mappings_end; i++) {
    Mapping *one = &mappings[i];
    if (!one->used || !overlaps(start, length, one->start, one->length)) continue;
    if (one->start < start || one->start + one->length > start + length) return false;
    covered += one->length;
  }
  return covered == length;
}

static void unmap_locked(uint64_t start, size_t length) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  place(start, length, PROT_NONE, flags, -1);
  for (int i = 0; i < mappings_end; i++)
    if (mappings[i].used && overlaps(start, length, mappings[i].start, mappings[i].length)) {
      if (mappings[i].imported) atomic_fetch_sub(&shared->imported_mapped, 1);
      if (mappings[i].opened) atomic_fetch_sub(&shared->opened, 1);
      mappings[i].used = false;
    }
}

API CUresult cuMemUnmap(uint64_t start, size_t length) {
  ENTER(false);
  pthread_mutex_lock(&table_lock);
  bool possible = length && is_reserved(start, length) && are_whole(start, length);
  if (possible) unmap_locked(start, length);
  pthread_mutex_unlock(&table_lock);
  return leave(possible ? SUCCESS : INVALID_VALUE);
}

API CUresult cuMemSetAccess(uint64_t start, size_t length, const Access *wanted, size_t found) {
  ENTER(false);
  if (!wanted || !found || wanted->location.type != 1 || (wanted->flags & ~3) || wanted->flags == 2)
    return leave(INVALID_VALUE);
  if (!is_device(wanted->location.id)) return leave(INVALID_DEVICE);
  pthread_mutex_lock(&table_lock);
  bool possible = length && fills(start, length);
  for (int i = 0; possible && i < mappings_end; i++)
    if (mappings[i].used && overlaps(start, length, mappings[i].start, mappings[i].length)) {
      mappings[i].readable = wanted->flags != 0;
      int protection = wanted->flags == 3 ? PROT_READ | PROT_WRITE : wanted->flags ? PROT_READ : 0;
      mprotect((void *)mappings[i].start, mappings[i].length, protection);
    }
  pthread_mutex_unlock(&table_lock);
  return leave(possible ? SUCCESS : INVALID_VALUE);
}

/* Maps what a file has at addresses of its own, as memory that needs no cuMemMap. */
static CUresult place_legacy(int fd, int ordinal, size_t length, bool opened, uint64_t *start) {
  for (int i = 0; i < TABLE_MAX; i++)
    if (!reservations[i].used) {
      uint64_t at = place_nowhere(0, length);
      if (!at) return OUT_OF_MEMORY;
      reservations[i] = (Reservation){true, at, length};
      if (i >= reservations_end) reservations_end = i + 1;
      Physical one = {true, fd, 1, ordinal, length, false, false};
      CUresult result = map_locked(at, length, &one, true);
      mprotect((void *)at, length, PROT_READ | PROT_WRITE);
      for (int j = 0; j < mappings_end; j++)
        if (mappings[j].used && mappings[j].start == at) {
          mappings[j].readable = true;
          mappings[j].opened = opened;
        }
      *start = at;
      return result;
    }
  return OUT_OF_MEMORY;
}

static CUresult free_legacy(uint64_t start, bool opened) {
  for (int i = 0; i < mappings_end; i++) {
    Mapping *one = &mappings[i];
    if (!one->used || !one->legacy || one->start != start || one->opened != opened) continue;
    size_t length = one->length;
    unmap_locked(start, length);
    munmap((void *)start, length);
    for (int j = 0; j < reservations_end; j++)
      if (reservations[j].used && reservations[j].start == start) reservations[j].used = false;
    return SUCCESS;
  }
  return INVALID_VALUE;
}

API CUresult cuMemAlloc_v2(uint64_t *start, size_t length) {
  ENTER(true);
  if (!length) return leave(INVALID_VALUE);
  size_t rounded = (length + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  pthread_mutex_lock(&table_lock);
  CUresult result = OUT_OF_MEMORY;
  int fd = make_memory(current->ordinal, rounded);
  if (fd >= 0) {
    result = place_legacy(fd, current->ordinal, rounded, false, start);
    close(fd);
  }
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

API CUresult cuMemFree_v2(uint64_t start) {
  ENTER(true);
  pthread_mutex_lock(&table_lock);
  CUresult result = free_legacy(start, false);
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

/* -- memory of other processes (CUDA IPC) ------------------------------------------------------ */

typedef struct { int pid, ordinal; uint64_t start, length; unsigned char rest[40]; } IpcHandle;

API CUresult cuIpcGetMemHandle(IpcHandle *handle, uint64_t start) {
  ENTER(true);
  pthread_mutex_lock(&table_lock);
  CUresult result = INVALID_VALUE;
  for (int i = 0; i < mappings_end && result; i++) {
    Mapping *one = &mappings[i];
    if (!one->used || !one->legacy || one->opened || one->start != start) continue;
    *handle = (IpcHandle){getpid(), one->ordinal, one->start, one->length, {0}};
    result = SUCCESS;
  }
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

API CUresult cuIpcOpenMemHandle_v2(uint64_t *start, IpcHandle handle, unsigned flags) {
  ENTER(true);
  if (flags != 1 || !is_device(handle.ordinal)) return leave(INVALID_VALUE);
  if (handle.pid == getpid()) return leave(INVALID_CONTEXT);
  char path[96];
  snprintf(path, sizeof path, "/proc/%d/map_files/%lx-%lx", handle.pid, handle.start,
           handle.start + handle.length);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return leave(INVALID_VALUE);
  pthread_mutex_lock(&table_lock);
  CUresult result = place_legacy(fd, handle.ordinal, handle.length, true, start);
  if (!result) atomic_fetch_add(&shared->opened, 1);
  close(fd);
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

API CUresult cuIpcCloseMemHandle(uint64_t start) {
  ENTER(true);
  pthread_mutex_lock(&table_lock);
  CUresult result = free_legacy(start, true);
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

/* Some attributes only; 8 and 17, managed memory and pools, are never so here. */
API CUresult cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t address) {
  ENTER(false);
  pthread_mutex_lock(&table_lock);
  CUresult result = INVALID_VALUE;
  for (int i = 0; i < mappings_end && result; i++) {
    Mapping *one = &mappings[i];
    if (!one->used || address < one->start || address >= one->start + one->length) continue;
    result = SUCCESS;
    switch (attribute) {
      case 1: *value = one->legacy ? (uintptr_t)&contexts[one->ordinal] : 0; break;
      case 2: *(unsigned *)value = 2; break;
      case 8: *(unsigned char *)value = 0; break;
      case 10: *(unsigned char *)value = one->legacy && !one->opened; break;
      case 11: *value = one->start; break;
      case 12: *value = one->length; break;
      case 17: *value = 0; break;
      default: result = INVALID_VALUE;
    }
  }
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

/* -- host memory ------------------------------------------------------------------------------- */

static CUresult add_host(uintptr_t start, size_t length, bool ours) {
  for (int i = 0; i < hosts_end; i++)
    if (hosts[i].used && overlaps(start, length, hosts[i].start, hosts[i].length))
      return HOST_MEMORY_ALREADY_REGISTERED;
  for (int i = 0; i < TABLE_MAX; i++)
    if (!hosts[i].used) {
      hosts[i] = (Host){true, ours, start, length};
      if (i >= hosts_end) hosts_end = i + 1;
      return SUCCESS;
    }
  return OUT_OF_MEMORY;
}

API CUresult cuMemHostAlloc(void **start, size_t length, unsigned flags) {
  (void)flags;
  ENTER(true);
  if (!length) return leave(INVALID_VALUE);
  void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return leave(OUT_OF_MEMORY);
  pthread_mutex_lock(&table_lock);
  CUresult result = add_host((uintptr_t)at, length, true);
  pthread_mutex_unlock(&table_lock);
  *start = at;
  return leave(result);
}

static CUresult drop_host(void *start, bool ours, CUresult otherwise) {
  pthread_mutex_lock(&table_lock);
  CUresult result = otherwise;
  for (int i = 0; i < hosts_end; i++)
    if (hosts[i].used && hosts[i].ours == ours && hosts[i].start == (uintptr_t)start) {
      if (ours) munmap(start, hosts[i].length);
      hosts[i].used = false;
      result = SUCCESS;
    }
  pthread_mutex_unlock(&table_lock);
  return result;
}

API CUresult cuMemFreeHost(void *start) {
  ENTER(true);
  return leave(drop_host(start, true, INVALID_VALUE));
}

API CUresult cuMemHostRegister_v2(void *start, size_t length, unsigned flags) {
  (void)flags;
  ENTER(true);
  unsigned char resident;
  if (!start || !length) return leave(INVALID_VALUE);
  if (mincore((void *)((uintptr_t)start & ~4095ul), 1, &resident) < 0) return leave(INVALID_VALUE);
  pthread_mutex_lock(&table_lock);
  CUresult result = add_host((uintptr_t)start, length, false);
  if (!result) count(REGISTERED_BYTES, length);
  pthread_mutex_unlock(&table_lock);
  return leave(result);
}

API CUresult cuMemHostUnregister(void *start) {
  ENTER(true);
  return leave(drop_host(start, false, HOST_MEMORY_NOT_REGISTERED));
}

static bool is_locked_memory(uintptr_t start, size_t length) {
  bool found = false;
  pthread_mutex_lock(&table_lock);
  for (int i = 0; i < hosts_end && !found; i++)
    found = hosts[i].used && hosts[i].start <= start && start + length <= hosts[i].start + hosts[i].length;
  pthread_mutex_unlock(&table_lock);
  return found;
}

/* -- streams ----------------------------------------------------------------------------------- */

static bool covered_locked(uint64_t start, size_t length) {
  uint64_t at = start;
  while (at < start + length) {
    uint64_t before = at;
    for (int i = 0; i < mappings_end; i++)
      if (mappings[i].used && mappings[i].readable && mappings[i].start <= at &&
          at < mappings[i].start + mappings[i].length)
        at = mappings[i].start + mappings[i].length;
    if (at == before) return false;
  }
  return true;
}

static bool is_accessible(uint64_t start, size_t length) {
  pthread_mutex_lock(&table_lock);
  bool possible = covered_locked(start, length);
  pthread_mutex_unlock(&table_lock);
  return possible;
}

static void run_kernel(Operation *one) {
  EmulatedLaunch *launch = &one->launch;
  for (launch->block.z = 0; launch->block.z < launch->grid_dim.z; launch->block.z++)
    for (launch->block.y = 0; launch->block.y < launch->grid_dim.y; launch->block.y++)
      for (launch->block.x = 0; launch->block.x < launch->grid_dim.x; launch->block.x++)
        one->kernel(launch, one->arguments);
}

/* Runs on the stream's thread. What is not mapped any more is what a GPU calls illegal address. */
static void perform(Operation *one) {
  if (settings.delay_us && one->kind != RECORD && one->kind != WAIT) usleep(settings.delay_us);
  if (one->kind == RECORD || one->kind == WAIT) {
    pthread_mutex_lock(&one->event->lock);
    if (one->kind == RECORD && one->event->completed < one->ticket) one->event->completed = one->ticket;
    while (one->kind == WAIT && one->event->completed < one->ticket)
      pthread_cond_wait(&one->event->done, &one->event->lock);
    pthread_cond_broadcast(&one->event->done);
    pthread_mutex_unlock(&one->event->lock);
    return;
  }
  if (atomic_load(&sticky)) return;
  if (one->kind == LAUNCH) { run_kernel(one); return; }
  /* Under the lock, so that nobody unmaps it meanwhile. */
  pthread_mutex_lock(&table_lock);
  bool possible = one->kind == COPY_OUT || covered_locked(one->to, one->length);
  if (one->kind == COPY_OUT || one->kind == COPY_WITHIN)
    possible = possible && covered_locked(one->from, one->length);
  if (!possible) atomic_store(&sticky, ILLEGAL_ADDRESS);
  else if (one->kind == SET) memset((void *)one->to, one->value, one->length);
  else memmove((void *)one->to, one->staged ? one->staged : (void *)one->from, one->length);
  pthread_mutex_unlock(&table_lock);
}

static void *work(void *argument) {
  Stream *stream = argument;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (!stream->first && !stream->ending) pthread_cond_wait(&stream->changed, &stream->lock);
    Operation *one = stream->first;
    if (!one) break;
    stream->first = one->next;
    if (!stream->first) stream->last = NULL;
    pthread_mutex_unlock(&stream->lock);
    perform(one);
    if (one->arguments) { free(one->arguments[0]); free(one->arguments); }
    free(one->staged);
    free(one);
    atomic_fetch_sub(&shared->pending, 1);
    pthread_mutex_lock(&stream->lock);
    stream->queued--;
    pthread_cond_broadcast(&stream->changed);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

static Stream *make_stream(Context *context) {
  Stream *stream = calloc(1, sizeof *stream);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  stream->context = context;
  if (pthread_create(&stream->thread, NULL, work, stream)) { free(stream); return NULL; }
  pthread_mutex_lock(&table_lock);
  stream->next = streams;
  streams = stream;
  pthread_mutex_unlock(&table_lock);
  return stream;
}

/* The stream that is meant; 0 is the default one of the context. NULL if there is no such stream. */
static Stream *stream_of(Stream *given) {
  Stream *found = NULL;
  pthread_mutex_lock(&table_lock);
  Stream *wanted = given ? given : default_streams[current->ordinal];
  for (Stream *one = streams; one && !found; one = one->next)
    if (one == wanted) found = one;
  pthread_mutex_unlock(&table_lock);
  if (!found && !given) found = default_streams[current->ordinal] = make_stream(current);
  return found;
}

static void queue_operation(Stream *stream, Operation *one) {
  atomic_fetch_add(&shared->pending, 1);
  pthread_mutex_lock(&stream->lock);
  if (stream->last) stream->last->next = one; else stream->first = one;
  stream->last = one;
  stream->queued++;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

static void drain(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  while (stream->queued) pthread_cond_wait(&stream->changed, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
}

API CUresult cuStreamCreate(Stream **stream, unsigned flags) {
  ENTER(true);
  if (flags > 1) return leave(INVALID_VALUE);
  *stream = make_stream(current);
  return leave(*stream ? SUCCESS : OUT_OF_MEMORY);
}

API CUresult cuStreamDestroy_v2(Stream *stream) {
  ENTER(true);
  if (!stream || !stream_of(stream)) return leave(INVALID_HANDLE);
  pthread_mutex_lock(&stream->lock);
  stream->ending = true;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  pthread_join(stream->thread, NULL);
  pthread_mutex_lock(&table_lock);
  for (Stream **at = &streams; *at; at = &(*at)->next)
    if (*at == stream) { *at = stream->next; break; }
  pthread_mutex_unlock(&table_lock);
  free(stream);
  return leave(SUCCESS);
}

API CUresult cuStreamSynchronize(Stream *given) {
  ENTER(true);
  Stream *stream = stream_of(given);
  if (!stream) return leave(INVALID_HANDLE);
  drain(stream);
  return leave(atomic_load(&sticky));
}

API CUresult cuStreamQuery(Stream *given) {
  ENTER(true);
  Stream *stream = stream_of(given);
  if (!stream) return leave(INVALID_HANDLE);
  pthread_mutex_lock(&stream->lock);
  bool busy = stream->queued > 0;
  pthread_mutex_unlock(&stream->lock);
  return leave(busy ? NOT_READY : atomic_load(&sticky));
}

API CUresult cuCtxSynchronize(void) {
  ENTER(true);
  for (;;) {
    Stream *busy = NULL;
    pthread_mutex_lock(&table_lock);
    for (Stream *one = streams; one && !busy; one = one->next) {
      pthread_mutex_lock(&one->lock);
      if (one->context == current && one->queued) busy = one;
      pthread_mutex_unlock(&one->lock);
    }
    pthread_mutex_unlock(&table_lock);
    if (!busy) return leave(atomic_load(&sticky));
    drain(busy);
  }
}

/* -- events ------------------------------------------------------------------------------------ */

API CUresult cuEventCreate(Event **event, unsigned flags) {
  (void)flags;
  ENTER(true);
  *event = calloc(1, sizeof **event);
  pthread_mutex_init(&(*event)->lock, NULL);
  pthread_cond_init(&(*event)->done, NULL);
  return leave(SUCCESS);
}

API CUresult cuEventDestroy_v2(Event *event) {
  ENTER(true);
  if (!event) return leave(INVALID_HANDLE);
  /* A stream may still have it to do: it is small, and stays. */
  return leave(SUCCESS);
}

static CUresult queue_event(Event *event, Stream *given, Kind kind) {
  Stream *stream = stream_of(given);
  if (!stream || !event) return INVALID_HANDLE;
  Operation *one = calloc(1, sizeof *one);
  one->kind = kind;
  one->event = event;
  pthread_mutex_lock(&event->lock);
  one->ticket = kind == RECORD ? ++event->recorded : event->recorded;
  pthread_mutex_unlock(&event->lock);
  queue_operation(stream, one);
  return SUCCESS;
}

API CUresult cuEventRecord(Event *event, Stream *stream) {
  ENTER(true);
  return leave(queue_event(event, stream, RECORD));
}

API CUresult cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
  ENTER(true);
  if (flags) return leave(INVALID_VALUE);
  return leave(queue_event(event, stream, WAIT));
}

API CUresult cuEventQuery(Event *event) {
  ENTER(true);
  if (!event) return leave(INVALID_HANDLE);
  pthread_mutex_lock(&event->lock);
  bool done = event->completed >= event->recorded;
  pthread_mutex_unlock(&event->lock);
  return leave(done ? atomic_load(&sticky) : NOT_READY);
}

API CUresult cuEventSynchronize(Event *event) {
  ENTER(true);
  if (!event) return leave(INVALID_HANDLE);
  pthread_mutex_lock(&event->lock);
  while (event->completed < event->recorded) pthread_cond_wait(&event->done, &event->lock);
  pthread_mutex_unlock(&event->lock);
  return leave(atomic_load(&sticky));
}

/* -- copies ------------------------------------------------------------------------------------ */

static CUresult queue_copy(Kind kind, uint64_t to, uint64_t from, size_t length, int value,
                           Stream *given) {
  if (!length) return SUCCESS;
  if (kind != COPY_OUT && !is_accessible(to, length)) return INVALID_VALUE;
  if ((kind == COPY_OUT || kind == COPY_WITHIN) && !is_accessible(from, length)) return INVALID_VALUE;
  Stream *stream = stream_of(given);
  if (!stream) return INVALID_HANDLE;
  Operation *one = calloc(1, sizeof *one);
  one->kind = kind;
  one->to = to;
  one->from = from;
  one->length = length;
  one->value = value;
  bool waits = false;
  if (kind == COPY_IN) {
    count(BYTES_IN, length);
    if (!is_locked_memory(from, length)) {
      /* What is not page-locked is copied away before the call returns. */
      count(PAGEABLE_BYTES_IN, length);
      one->staged = malloc(length);
      memcpy(one->staged, (void *)from, length);
    }
  } else if (kind == COPY_OUT) {
    count(BYTES_OUT, length);
    waits = !is_locked_memory(to, length);
    if (waits) count(PAGEABLE_BYTES_OUT, length);
  } else {
    count(kind == SET ? BYTES_SET : BYTES_WITHIN, length);
  }
  queue_operation(stream, one);
  if (waits) drain(stream);
  return waits ? atomic_load(&sticky) : SUCCESS;
}

API CUresult cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t length, Stream *stream) {
  ENTER(true);
  return leave(queue_copy(COPY_IN, to, (uintptr_t)from, length, 0, stream));
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t length, Stream *stream) {
  ENTER(true);
  return leave(queue_copy(COPY_OUT, (uintptr_t)to, from, length, 0, stream));
}

API CUresult cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t length, Stream *stream) {
  ENTER(true);
  return leave(queue_copy(COPY_WITHIN, to, from, length, 0, stream));
}

API CUresult cuMemsetD8Async(uint64_t to, unsigned char value, size_t length, Stream *stream) {
  ENTER(true);
  return leave(queue_copy(SET, to, 0, length, value, stream));
}

/* -- kernels ----------------------------------------------------------------------------------- */

typedef struct { EmulatedKernel kernel; const uint32_t *sizes; } Function;

API CUresult cuModuleLoadData(void **module, const char *image) {
  ENTER(true);
  if (strncmp(image, IMAGE_PREFIX, strlen(IMAGE_PREFIX))) return leave(INVALID_IMAGE);
  *module = dlopen(image + strlen(IMAGE_PREFIX), RTLD_NOW | RTLD_LOCAL);
  return leave(*module ? SUCCESS : INVALID_IMAGE);
}

API CUresult cuModuleUnload(void *module) {
  ENTER(true);
  if (!module) return leave(INVALID_HANDLE);
  dlclose(module);
  return leave(SUCCESS);
}

API CUresult cuModuleGetFunction(Function **function, void *module, const char *name) {
  ENTER(true);
  char symbol[256];
  snprintf(symbol, sizeof symbol, "%s__block", name);
  void *kernel = dlsym(module, symbol);
  snprintf(symbol, sizeof symbol, "%s__sizes", name);
  void *sizes = dlsym(module, symbol);
  if (!kernel || !sizes) return leave(NOT_FOUND);
  *function = calloc(1, sizeof **function);
  **function = (Function){(EmulatedKernel)kernel, sizes};
  return leave(SUCCESS);
}

API CUresult cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared_bytes, Stream *given,
                            void **parameters, void **extra) {
  ENTER(true);
  if (!function) return leave(INVALID_HANDLE);
  if (!gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024 || extra)
    return leave(INVALID_VALUE);
  Stream *stream = stream_of(given);
  if (!stream) return leave(INVALID_HANDLE);
  size_t total = 1, many = 0;
  for (; function->sizes[many]; many++) total += (function->sizes[many] + 15) / 16 * 16;
  Operation *one = calloc(1, sizeof *one);
  one->kind = LAUNCH;
  one->kernel = function->kernel;
  one->launch = (EmulatedLaunch){{gx, gy, gz}, {bx, by, bz}, {0, 0, 0}, shared_bytes};
  /* Arguments are copied now: the caller's may be gone when it runs. */
  one->arguments = calloc(many + 1, sizeof(void *));
  unsigned char *copy = malloc(total);
  one->arguments[0] = copy;
  for (size_t i = 0; i < many; copy += (function->sizes[i] + 15) / 16 * 16, i++) {
    memcpy(copy, parameters[i], function->sizes[i]);
    one->arguments[i] = copy;
  }
  count(LAUNCHES, 1);
  queue_operation(stream, one);
  return leave(SUCCESS);
}

/* -- the checkpoint of another process --------------------------------------------------------- */

typedef struct { unsigned timeout_ms, reserved0; uint64_t reserved1[7]; } LockArguments;
typedef struct { Uuid old_uuid, new_uuid; } Pair;
typedef struct { Pair *pairs; unsigned pairs_count; } RestoreArguments;

static Shared *open_state(int pid) {
  char path[320], link[64];
  snprintf(path, sizeof path, "/proc/%d/fd", pid);
  DIR *dir = opendir(path);
  Shared *page = NULL;
  if (!dir) return NULL;
  for (struct dirent *entry; !page && (entry = readdir(dir)) != NULL;) {
    snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, entry->d_name);
    ssize_t length = readlink(path, link, sizeof link - 1);
    if (length <= 0) continue;
    link[length] = 0;
    if (strncmp(link, "/memfd:" STATE_NAME, strlen("/memfd:" STATE_NAME))) continue;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) page = NULL;
    close(fd);
  }
  closedir(dir);
  return page;
}

/* What is said of a process that has nothing to do with CUDA, or is not there. */
static CUresult no_state(int pid) {
  char path[32];
  snprintf(path, sizeof path, "/proc/%d", pid);
  return access(path, F_OK) ? OPERATING_SYSTEM : NOT_INITIALIZED;
}

static CUresult finish(Shared *page, CUresult result) {
  munmap(page, 4096);
  return result;
}

API CUresult cuCheckpointProcessGetState(int pid, int *state) {
  ENTER(false);
  Shared *page = open_state(pid);
  if (!page) return leave(no_state(pid));
  *state = atomic_load(&page->state);
  return leave(finish(page, SUCCESS));
}

API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
  ENTER(false);
  Shared *page = open_state(pid);
  if (!page) return leave(no_state(pid));
  *tid = page->tid;
  return leave(finish(page, SUCCESS));
}

API CUresult cuCheckpointProcessLock(int pid, LockArguments *arguments) {
  ENTER(false);
  Shared *page = open_state(pid);
  if (!page) return leave(no_state(pid));
  int expected = RUNNING;
  if (!atomic_compare_exchange_strong(&page->state, &expected, LOCKED))
    return leave(finish(page, ILLEGAL_STATE));
  int64_t deadline = now_us() + (arguments ? arguments->timeout_ms : 0) * 1000ll;
  while (atomic_load(&page->inside) || atomic_load(&page->pending)) {
    if (arguments && arguments->timeout_ms && now_us() > deadline) {
      atomic_store(&page->state, RUNNING);
      return leave(finish(page, NOT_READY));
    }
    usleep(200);
  }
  return leave(finish(page, SUCCESS));
}

static CUresult change(int pid, int from, int to) {
  ENTER(false);
  Shared *page = open_state(pid);
  if (!page) return leave(no_state(pid));
  bool right = atomic_compare_exchange_strong(&page->state, &from, to);
  return leave(finish(page, right ? SUCCESS : ILLEGAL_STATE));
}

API CUresult cuCheckpointProcessCheckpoint(int pid, void *arguments) {
  (void)arguments;
  ENTER(false);
  Shared *page = open_state(pid);
  if (!page) return leave(no_state(pid));
  int expected = LOCKED;
  bool right = atomic_compare_exchange_strong(&page->state, &expected, CHECKPOINTED);
  return leave(finish(page, right ? SUCCESS : ILLEGAL_STATE));
}

static bool translate(Shared *page, const RestoreArguments *arguments) {
  for (int i = 0; i < page->device_count; i++) {
    Uuid wanted = page->uuids[i];
    for (unsigned j = 0; arguments && j < arguments->pairs_count; j++)
      if (!memcmp(&arguments->pairs[j].old_uuid, &page->uuids[i], 16))
        wanted = arguments->pairs[j].new_uuid;
    bool here = false;
    for (int j = 0; j < shared->device_count; j++) here |= !memcmp(&shared->uuids[j], &wanted, 16);
    if (!here) return false;
    page->uuids[i] = wanted;
  }
  return true;
}

API CUresult cuCheckpointProcessRestore(int pid, const RestoreArguments *arguments) {
  ENTER(false);
  Shared *page = open_state(pid);
  if (!page) return leave(no_state(pid));
  CUresult result = SUCCESS;
  if (atomic_load(&page->state) != CHECKPOINTED) result = ILLEGAL_STATE;
  /* Memory of other processes cannot be part of a checkpoint, which is noticed too late. */
  else if (atomic_load(&page->imported_mapped)) result = NOT_SUPPORTED;
  else if (atomic_load(&page->opened)) result = INVALID_VALUE;
  else if (!translate(page, arguments)) result = INVALID_VALUE;
  else atomic_store(&page->state, LOCKED);
  return leave(finish(page, result));
}

API CUresult cuCheckpointProcessUnlock(int pid, void *arguments) {
  (void)arguments;
  return change(pid, LOCKED, RUNNING);
}

/* -- for tests --------------------------------------------------------------------------------- */

API uint64_t emulated_cuda_counter(int which) {
  return shared && which >= 0 && which < COUNTERS ? atomic_load(&shared->counters[which]) : 0;
}
