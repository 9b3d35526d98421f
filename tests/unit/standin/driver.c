/* A stand-in for libcuda.so.1 (-DCUDA) and libamdhip64.so (-DHIP), for tests on machines without a GPU.

   It has two devices whose memory is host memory (files, so that another process can open it through an IPC handle), checks what a driver
   checks (a current context, known addresses, known handles), and writes every call into $STANDIN_DIR/log.<pid>. A module's image is text:
   "KERNEL <name> <parameter size> ...". A launch copies the parameters into the log. A kernel named "fault" writes the fault record
   (kind 1, the site word in its first parameter) into the context its last parameter points to; one named "crash" does so too and leaves
   the device with an error. One named "stuck" does so too and keeps its stream busy until the file STANDIN_DIR/end.<pid> is there: what
   waits then, the end of the process included, does not come back before. One named "slow" keeps it busy for 1/20 s. A launch on a stream under capture is only recorded, and what a driver refuses then is refused and spoils the
   capture; a replayed launch is logged with "replay" before it. Memory of the virtual memory calls is a memfd; a fabric handle is refused
   with "not permitted", descriptors too when STANDIN_NO_FD is set.

   As HIP it holds that what goes to other processes is uncached, which the library itself does not: nothing else is coherent while kernels
   run. STANDIN_HIP_VERSION is the HIP_VERSION it is (70200000 if not set): before 7.1 a descriptor is imported by its address.
   STANDIN_NO_UNCACHED: as a library that knows no uncached memory for descriptors. STANDIN_NO_UUID: its devices have no numbers of their own.

   An image "SIMULATED <number> <name>" is a kernel that simulated/sitecustomize.py runs, when it has connected itself.

   -DOLD leaves out what came with CUDA 12.4 and HIP 6. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_PTX = 218,
       INVALID_CONFIGURATION = 9, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, PEER_ALREADY = 704, NOT_PERMITTED = 800, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901 };

#define DEVICES 2
#define MAX 4096
#define CONTEXT_MAGIC 0xC0DE0000u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current = -1; /* device whose context is current on this thread */
static int retained[DEVICES], sticky[DEVICES], peer[DEVICES][DEVICES];

typedef struct { char *at; size_t size; int device; char path[64]; int opened, fd, uncached; } Memory;
typedef struct { int device; int live; char name[64]; int sizes[64]; int count, allowed, simulated; } Kernel;
static Memory memories[MAX];
static Kernel kernels[MAX];
static int memory_count, kernel_count, handle_count, handle_live[MAX], file_count;

static const char *directory(void) { const char *d = getenv("STANDIN_DIR"); return d ? d : "/tmp"; }

/* Kernels of the simulator, of which only simulated/sitecustomize.py knows. Streams go by their places. */
static void (*sim_start)(int kernel, int device, int place, int recording, const unsigned *dims, void **params);
static void (*sim_replay)(int recording, int place);
static int (*sim_busy)(int place);
void standin_simulate(void *start, void *replay, void *busy) { sim_start = start, sim_replay = replay, sim_busy = busy; }

/* What keeps a stream busy: forever until the file is there, or until a time. Stream 0 is the last entry. */
static int stuck[MAX + 1], was_busy;
static double busy_until[MAX + 1];
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }

static int place_of(void *stream) { return stream ? (int)((uint64_t)stream - 0x10000) : MAX; }

static int busy_place(int i) {
  char path[256];
  if (stuck[i]) {
    snprintf(path, sizeof path, "%s/end.%d", directory(), getpid());
    stuck[i] = access(path, F_OK) != 0;
  }
  return stuck[i] || now() < busy_until[i] || (sim_busy && sim_busy(i));
}

static int busy(void) {
  for (int i = 0; was_busy && i <= MAX; i++) if (busy_place(i)) return 1;
  return 0;
}

static void wait_for(void *stream) { while (busy_place(place_of(stream))) usleep(1000); }
static void wait_for_all(void) { while (busy()) usleep(1000); }
__attribute__((destructor)) static void the_process_ends(void) { wait_for_all(); }

static void say(const char *format, ...) {
  char path[256];
  snprintf(path, sizeof path, "%s/log.%d", directory(), getpid());
  FILE *f = fopen(path, "a");
  va_list list;
  va_start(list, format);
  vfprintf(f, format, list);
  va_end(list);
  fputc('\n', f);
  fclose(f);
}

static int need_context(void) { return current < 0 || !retained[current] ? INVALID_CONTEXT : sticky[current]; }
#define NEED do { int e_ = need_context(); if (e_) return e_; } while (0)

/* Capture: the lines of the launches, by the number of the recording. */
typedef struct { char lines[32][2048]; int count, spoiled; } Recording;
static Recording recordings[64];
static int recording_count, recording_of[MAX]; /* of a stream under capture, a graph or what was made of it */
static __thread int capturing;                 /* this thread's recording */
#define NOT_CAPTURED do { if (capturing) { recordings[capturing].spoiled = 1; return CAPTURE_UNSUPPORTED; } } while (0)

static Memory *find(uint64_t address) {
  for (int i = 0; i < memory_count; i++)
    if (memories[i].at && address >= (uint64_t)memories[i].at && address < (uint64_t)memories[i].at + memories[i].size) return &memories[i];
  return 0;
}

static int in_bounds(uint64_t address, size_t n) {
  uint64_t end = address + n;
  for (Memory *m; address < end; address = (uint64_t)m->at + m->size)
    if (!(m = find(address))) return 0;
  return 1;
}

static char *map_file(const char *path, size_t size, int create) {
  int fd = open(path, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  if (fd < 0) return 0;
  struct stat s;
  if (create && ftruncate(fd, size)) { close(fd); return 0; }
  if (!create && !fstat(fd, &s)) size = s.st_size;
  char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return at == MAP_FAILED ? 0 : at;
}

static int do_alloc(void **out, size_t size, int uncached) {
  NEED;
  NOT_CAPTURED;
  if (!size) return INVALID_VALUE;
  if (size > (1u << 30)) return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  Memory *m = &memories[memory_count++];
  snprintf(m->path, sizeof m->path, "%s/m%d_%d", directory(), getpid(), file_count++);
  m->at = map_file(m->path, size, 1);
  m->size = size, m->device = current, m->opened = 0, m->uncached = uncached;
  *out = m->at;
  pthread_mutex_unlock(&lock);
  return m->at ? OK : OUT_OF_MEMORY;
}

static int do_free(uint64_t address) {
  NEED;
  wait_for_all();
  Memory *m = find(address);
  if (!m || (uint64_t)m->at != address || m->opened) return INVALID_VALUE;
  munmap(m->at, m->size);
  unlink(m->path);
  m->at = 0;
  return OK;
}

/* Page-locked host memory. */
static void *host_blocks[MAX];
static int host_count;
static int host_block(void *p) { for (int i = 0; i < host_count; i++) if (p && host_blocks[i] == p) return i; return -1; }
static int do_host_alloc(void **out, size_t n) { NEED; NOT_CAPTURED; *out = host_blocks[host_count++] = calloc(1, n); return OK; }
static int do_host_pointer(void **out, void *p) { NEED; *out = p; return host_block(p) < 0 ? INVALID_VALUE : OK; }
static int do_host_free(void *p) { NEED; int i = host_block(p); if (i < 0) return INVALID_VALUE; free(p); host_blocks[i] = 0; return OK; }

static int do_ipc_get(char *handle, uint64_t address) {
  NEED;
  Memory *m = find(address);
  if (!m || (uint64_t)m->at != address || m->opened || !m->uncached) return INVALID_VALUE;
  memset(handle, 0, 64);
  strcpy(handle, m->path);
  return OK;
}

static int do_ipc_open(void **out, const char *handle, unsigned flags) {
  NEED;
  if (flags != 1) return INVALID_VALUE;
  struct stat s;
  if (stat(handle, &s)) return INVALID_HANDLE;
  /* Neither in the process it is from nor twice. */
  for (int i = 0; i < memory_count; i++)
    if (memories[i].at && !strcmp(memories[i].path, handle)) return memories[i].opened ? INVALID_VALUE : INVALID_CONTEXT;
  Memory *m = &memories[memory_count++];
  strcpy(m->path, handle);
  m->at = map_file(handle, 0, 0);
  m->size = s.st_size, m->device = current, m->opened = 1;
  *out = m->at;
  return m->at ? OK : INVALID_HANDLE;
}

static int do_ipc_close(uint64_t address) {
  NEED;
  wait_for_all();
  Memory *m = find(address);
  if (!m || !m->opened) return INVALID_VALUE;
  munmap(m->at, m->size);
  m->at = 0;
  return OK;
}

/* What a block may have of dynamic shared memory without cuFuncSetAttribute; with HIP, at all. */
#ifdef HIP
#define SHARED_LIMIT 65536
#else
#define SHARED_LIMIT 49152
#endif

static int do_module_load(void **out, const char *image) {
  NEED;
  NOT_CAPTURED;
  char text[512];
  snprintf(text, sizeof text, "%.500s", image);
  char *save, *word = strtok_r(text, " \n", &save);
  int simulated = word && sim_start && !strcmp(word, "SIMULATED") ? atoi(strtok_r(0, " \n", &save)) : 0;
  if (!word || (!simulated && strcmp(word, "KERNEL"))) return INVALID_IMAGE;
  Kernel *k = &kernels[++kernel_count];
  memset(k, 0, sizeof *k);
  strcpy(k->name, strtok_r(0, " \n", &save));
  while ((word = strtok_r(0, " \n", &save))) k->sizes[k->count++] = atoi(word);
  k->device = current, k->live = 1, k->allowed = SHARED_LIMIT, k->simulated = simulated;
  *out = k;
  return OK;
}

static int valid_kernel(void *k) { return (Kernel *)k > kernels && (Kernel *)k <= kernels + kernel_count && ((Kernel *)k)->live; }
static int valid_handle(void *h) { return !h || ((uint64_t)h > 0x10000 && (uint64_t)h < 0x10000 + MAX && handle_live[(uint64_t)h - 0x10000]); }
static int do_handle(void **out) { NEED; handle_live[++handle_count] = 1; *out = (void *)(uint64_t)(0x10000 + handle_count); return OK; }
static int do_handle_free(void *h) { NEED; if (!h || !valid_handle(h)) return INVALID_HANDLE; handle_live[(uint64_t)h - 0x10000] = 0; return OK; }

static int do_launch(const char *call, void *f, const unsigned *d, void *stream, void **params) {
  NEED;
  if (!valid_kernel(f) || !valid_handle(stream)) return INVALID_HANDLE;
  Kernel *k = f;
  if (k->device != current) return INVALID_HANDLE;
  for (int i = 0; i < 6; i++) if (!d[i]) return INVALID_VALUE;
  if (d[3] * d[4] * d[5] > 1024 || d[1] > 65535 || d[2] > 65535 || (int)d[6] > k->allowed) return INVALID_VALUE;
#ifdef HIP
  for (int i = 0; i < 3; i++) if ((uint64_t)d[i] * d[i + 3] >> 32) return INVALID_CONFIGURATION;
#endif
  if (k->simulated) {
    sim_start(k->simulated, current, place_of(stream), stream ? recording_of[(uint64_t)stream - 0x10000] : 0, d, params);
    was_busy = 1;
    return OK;
  }
  char line[2048];
  int n = snprintf(line, sizeof line, "%s %s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%d params=", call, k->name, d[0], d[1], d[2], d[3], d[4], d[5],
                   d[6], stream != 0);
  uint64_t first = 0, last = 0;
  for (int i = 0; i < k->count; i++) {
    uint64_t value = 0;
    memcpy(&value, params[i], k->sizes[i]);
    n += snprintf(line + n, sizeof line - n, "%s%lx", i ? "," : "", (unsigned long)value);
    if (!i) first = value;
    last = value;
  }
  int recording = stream ? recording_of[(uint64_t)stream - 0x10000] : 0;
  if (recording) {
    strcpy(recordings[recording].lines[recordings[recording].count++], line);
    return OK;
  }
  say("%s", line);
  if ((!strcmp(k->name, "fault") || !strcmp(k->name, "crash") || !strcmp(k->name, "stuck")) && first) {
    volatile uint64_t *w = (uint64_t *)last;
    uint64_t at = 8 + 8 * w[1]++;
    w[at] = 1, w[at + 1] = first, w[at + 2] = 2, w[at + 3] = 3, w[at + 4] = 0x1000, w[at + 5] = 5, w[at + 6] = 6, w[at + 7] = 1;
  }
  if (!strcmp(k->name, "crash")) sticky[current] = ILLEGAL_ADDRESS;
  if (!strcmp(k->name, "stuck")) stuck[place_of(stream)] = 1;
  if (!strcmp(k->name, "slow")) busy_until[place_of(stream)] = now() + 0.05;
  was_busy |= stuck[place_of(stream)] || busy_until[place_of(stream)] > 0;
  return OK;
}

static int stream_of_event[MAX], event_seen_done[MAX];
static int do_record(void *e, void *s) { NEED; if (!e || !valid_handle(e) || !valid_handle(s)) return INVALID_HANDLE; event_seen_done[(uint64_t)e - 0x10000] = 0; stream_of_event[(uint64_t)e - 0x10000] = place_of(s); return OK; }
static int do_query(void *s) { NEED; NOT_CAPTURED; if (!valid_handle(s)) return INVALID_HANDLE; return busy_place(place_of(s)) ? NOT_READY : OK; }
static int do_event_query(void *e) { NEED; if (!e || !valid_handle(e)) return INVALID_HANDLE; if (busy_place(stream_of_event[(uint64_t)e - 0x10000])) return NOT_READY; event_seen_done[(uint64_t)e - 0x10000] = 1; return OK; }
/* As strict as it can be: a caller that has not seen both events done has no right to their times. */
static int do_elapsed(float *ms, void *a, void *b) { NEED; if (!valid_handle(a) || !valid_handle(b)) return INVALID_HANDLE; if (!event_seen_done[(uint64_t)a - 0x10000] || !event_seen_done[(uint64_t)b - 0x10000]) return NOT_READY; *ms = (float)((uint64_t)b - (uint64_t)a) / 2; return OK; }

static int do_capture_begin(void *stream, int mode) {
  NEED;
  if (!stream || !valid_handle(stream)) return INVALID_HANDLE;
  if (mode != 1 || capturing) return INVALID_VALUE;
  capturing = ++recording_count;
  recording_of[(uint64_t)stream - 0x10000] = capturing;
  return OK;
}

static int do_capture_end(void *stream, void **out) {
  NEED;
  if (!stream || !valid_handle(stream)) return INVALID_HANDLE;
  int *of = &recording_of[(uint64_t)stream - 0x10000], recording = *of;
  if (!recording || recording != capturing) return INVALID_VALUE;
  *of = capturing = 0;
  *out = 0;
  if (recordings[recording].spoiled) return CAPTURE_INVALIDATED;
  int error = do_handle(out);
  recording_of[(uint64_t)*out - 0x10000] = recording;
  return error;
}

static int do_instantiate(void **out, void *graph) {
  NEED;
  if (!graph || !valid_handle(graph)) return INVALID_HANDLE;
  int error = do_handle(out);
  recording_of[(uint64_t)*out - 0x10000] = recording_of[(uint64_t)graph - 0x10000];
  return error;
}

static int do_graph_launch(void *graph, void *stream) {
  NEED;
  if (!graph || !valid_handle(graph) || !valid_handle(stream)) return INVALID_HANDLE;
  if (sim_replay) sim_replay(recording_of[(uint64_t)graph - 0x10000], place_of(stream));
  Recording *r = &recordings[recording_of[(uint64_t)graph - 0x10000]];
  for (int i = 0; i < r->count; i++) say("replay stream=%d %s", stream != 0, r->lines[i]);
  return OK;
}

static int do_graph_free(void *graph) {
  int error = do_handle_free(graph);
  if (!error) recording_of[(uint64_t)graph - 0x10000] = 0;
  return error;
}

/* Virtual memory: cuda.h's CUmemAllocationProp and CUmemAccessDesc, which HIP's are equal to. */
typedef struct { int type, requested; struct { int type, id; } location; void *win32; unsigned char flags[8]; } Properties;
typedef struct { struct { int type, id; } location; int flags; } Access;
typedef struct { int fd, live, requested; size_t size; } Physical;
static Physical physicals[MAX];
static int physical_count, physical_live;
static uint64_t reserved_bytes;
#define GRANULE (2u << 20)
#ifdef HIP
static int hip_version(void) { const char *v = getenv("STANDIN_HIP_VERSION"); return v ? atoi(v) : 70200000; }
#define REFUSED NOT_SUPPORTED
#define ALLOCATION_TYPE (getenv("STANDIN_NO_UNCACHED") ? 1 : 0x40000000) /* hipMemAllocationTypePinned, ...Uncached */
#else
#define REFUSED NOT_PERMITTED
#define ALLOCATION_TYPE 1 /* CU_MEM_ALLOCATION_TYPE_PINNED */
#endif

static Physical *physical(uint64_t h) { return h && h <= (uint64_t)physical_count && physicals[h].live ? &physicals[h] : 0; }
static int valid_properties(const Properties *p) { return p->type == ALLOCATION_TYPE && p->location.type == 1 && p->location.id == current && !p->win32; }
static int do_granularity(size_t *out, const Properties *p) { NEED; if (!valid_properties(p)) return INVALID_VALUE; *out = GRANULE; return OK; }

static int add_physical(uint64_t *out, int fd, size_t size, int requested) {
  pthread_mutex_lock(&lock);
  Physical *p = &physicals[++physical_count];
  p->fd = fd, p->live = 1, p->size = size, p->requested = requested;
  *out = physical_count;
  physical_live++;
  pthread_mutex_unlock(&lock);
  return OK;
}

static int do_mem_create(uint64_t *out, size_t size, const Properties *p, uint64_t flags) {
  NEED;
  NOT_CAPTURED;
  if (flags || !valid_properties(p) || !size || size % GRANULE) return INVALID_VALUE;
  if (p->requested == 8 || (p->requested == 1 && getenv("STANDIN_NO_FD"))) return REFUSED;
  if (p->requested != 1) return INVALID_VALUE;
  if (size > (1u << 30)) return OUT_OF_MEMORY;
  int fd = memfd_create("standin", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
  return add_physical(out, fd, size, p->requested);
}

static int do_mem_export(int *out, uint64_t h, int type, uint64_t flags) {
  NEED;
  Physical *p = physical(h);
  if (!p || flags || type != p->requested) return INVALID_VALUE;
  *out = dup(p->fd);
  return OK;
}

static int do_mem_import(uint64_t *out, int fd, int type) {
  NEED;
  struct stat s;
  if (type != 1 || fstat(fd, &s)) return INVALID_VALUE;
  return add_physical(out, dup(fd), s.st_size, type);
}

static int do_mem_release(uint64_t h) {
  NEED;
  Physical *p = physical(h);
  if (!p) return INVALID_VALUE;
  close(p->fd);
  p->live = 0;
  physical_live--;
  return OK;
}

static int do_reserve(uint64_t *out, size_t size, size_t alignment, uint64_t flags) {
  NEED;
  if (flags || !size || size % GRANULE || alignment & (alignment - 1) || alignment > GRANULE) return INVALID_VALUE;
  void *at = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *out = (uint64_t)at;
  reserved_bytes += size;
  return at == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

static int do_unreserve(uint64_t at, size_t size) {
  NEED;
  if (find(at) || munmap((void *)at, size)) return INVALID_VALUE;
  reserved_bytes -= size;
  say("unreserved left=%lu handles=%d", (unsigned long)reserved_bytes, physical_live);
  return OK;
}

static int do_map(uint64_t at, size_t size, size_t offset, uint64_t h, uint64_t flags) {
  NEED;
  Physical *p = physical(h);
  if (!p || offset || flags || size != p->size || find(at)) return INVALID_VALUE;
  if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
  Memory *m = &memories[memory_count++];
  m->at = (char *)at, m->size = size, m->device = current, m->opened = 2, m->fd = dup(p->fd);
  return OK;
}

static int do_unmap(uint64_t at, size_t size) {
  NEED;
  wait_for_all();
  Memory *m = find(at);
  if (!m || m->opened != 2 || (uint64_t)m->at != at || m->size != size) return INVALID_VALUE;
  mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  close(m->fd);
  m->at = 0;
  return OK;
}

static int do_retain(uint64_t *out, uint64_t at) {
  NEED;
  Memory *m = find(at);
  return m && m->opened == 2 ? add_physical(out, dup(m->fd), m->size, 1) : INVALID_VALUE;
}

static int do_access(uint64_t at, size_t size, const Access *a, size_t count) {
  NEED;
  if (count != 1 || a->location.type != 1 || a->location.id != current || a->flags != 3) return INVALID_VALUE;
  for (uint64_t p = at; p < at + size;) {
    Memory *m = find(p);
    if (!m || m->opened != 2) return INVALID_VALUE;
    p += m->size;
  }
  return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}

static int do_range(uint64_t *base, size_t *size, uint64_t at) {
  NEED;
  Memory *m = find(at);
  if (!m) return INVALID_VALUE;
  *base = (uint64_t)m->at, *size = m->size;
  return OK;
}

static int do_can_access(int *can, int a, int b) { *can = a != b; return a < 0 || a >= DEVICES || b < 0 || b >= DEVICES ? INVALID_DEVICE : OK; }

static int do_uuid(char *out, int d) {
  for (int i = 0; i < 16; i++) out[i] = "0123456789abcdef"[(i + d) % 16];
  return d < 0 || d >= DEVICES ? INVALID_DEVICE : OK;
}

/* cuda.h and hip_runtime_api.h: the values are the same, the names are not. HIP has no 800, CUDA no 9. */
static const struct { int value; const char *cuda, *hip, *text; } errors[] = {
  {OK, "CUDA_SUCCESS", "hipSuccess", "no error"},
  {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "hipErrorInvalidValue", "invalid argument"},
  {INVALID_CONFIGURATION, 0, "hipErrorInvalidConfiguration", "invalid configuration argument"},
  {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory", "out of memory"},
  {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "hipErrorInvalidDevice", "invalid device ordinal"},
  {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "hipErrorInvalidImage", "device kernel image is invalid"},
  {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "hipErrorInvalidContext", "invalid device context"},
  {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "hipErrorInvalidKernelFile", "a PTX JIT compilation failed"},
  {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "hipErrorInvalidHandle", "invalid resource handle"},
  {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "hipErrorNotFound", "named symbol not found"},
  {NOT_READY, "CUDA_ERROR_NOT_READY", "hipErrorNotReady", "device not ready"},
  {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress", "an illegal memory access was encountered"},
  {PEER_ALREADY, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
  {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", 0, "operation not permitted"},
  {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "hipErrorNotSupported", "operation not supported"},
  {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
  {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "hipErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
};
static int error_index(int e) { for (int i = 0; i < (int)(sizeof errors / sizeof *errors); i++) if (errors[i].value == e) return i; abort(); }

#ifdef CUDA
typedef uint64_t P;
int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
int cuGetErrorName(int e, const char **out) { *out = errors[error_index(e)].cuda; return OK; }
int cuGetErrorString(int e, const char **out) { *out = errors[error_index(e)].text; return OK; }
int cuDeviceGetCount(int *n) { *n = DEVICES; return OK; }
int cuDeviceGet(int *d, int index) { if (index < 0 || index >= DEVICES) return INVALID_DEVICE; *d = index; return OK; }
int cuDeviceGetName(char *name, int n, int d) { snprintf(name, n, "stand-in %d", d); return OK; }
int cuDeviceTotalMem(size_t *n, int d) { *n = 1ull << 30; return OK; }
int cuDeviceGetAttribute(int *v, int attribute, int d) {
  switch (attribute) {
    case 1: *v = 1024; break;      /* MAX_THREADS_PER_BLOCK */
    case 10: *v = 32; break;       /* WARP_SIZE */
    case 16: *v = 132; break;      /* MULTIPROCESSOR_COUNT */
    case 75: *v = 9; break;        /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *v = 0; break;        /* COMPUTE_CAPABILITY_MINOR */
    case 97: *v = 232448; break;   /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    default: return INVALID_VALUE;
  }
  return OK;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { retained[d]++; *c = (void *)(uint64_t)(CONTEXT_MAGIC + d); return OK; }
int cuDevicePrimaryCtxRelease(int d) { if (!retained[d]) return INVALID_CONTEXT; retained[d]--; say("cuDevicePrimaryCtxRelease %d left=%d", d, retained[d]); return OK; }
int cuCtxSetCurrent(void *c) {
  uint64_t d = (uint64_t)c - CONTEXT_MAGIC;
  if (d >= DEVICES || !retained[d]) return INVALID_CONTEXT;
  current = d;
  return OK;
}
int cuDeviceGetUuid(char *out, int d) { return do_uuid(out, d); }
int cuDeviceGetUuid_v2(char *out, int d) { return do_uuid(out, d); }
int cuStreamBeginCapture(void *s, int mode) { return do_capture_begin(s, mode); }
int cuStreamEndCapture(void *s, void **graph) { return do_capture_end(s, graph); }
int cuGraphInstantiate(void **out, void *graph, uint64_t flags) { return flags ? INVALID_VALUE : do_instantiate(out, graph); }
int cuGraphInstantiateWithFlags(void **out, void *graph, uint64_t flags) { return cuGraphInstantiate(out, graph, flags); }
int cuGraphLaunch(void *graph, void *s) { return do_graph_launch(graph, s); }
int cuGraphDestroy(void *graph) { return do_graph_free(graph); }
int cuGraphExecDestroy(void *graph) { say("cuGraphExecDestroy"); return do_graph_free(graph); }
int cuMemGetAllocationGranularity(size_t *out, const Properties *p, int option) { return option == 1 ? do_granularity(out, p) : INVALID_VALUE; }
int cuMemCreate(uint64_t *out, size_t n, const Properties *p, uint64_t flags) { return do_mem_create(out, n, p, flags); }
int cuMemExportToShareableHandle(void *out, uint64_t h, int type, uint64_t flags) { return do_mem_export(out, h, type, flags); }
int cuMemImportFromShareableHandle(uint64_t *out, void *shared, int type) { return do_mem_import(out, (int)(uint64_t)shared, type); }
int cuMemRelease(uint64_t h) { return do_mem_release(h); }
int cuMemAddressReserve(P *out, size_t n, size_t alignment, P where, uint64_t flags) { return do_reserve(out, n, alignment, flags); }
int cuMemAddressFree(P at, size_t n) { return do_unreserve(at, n); }
int cuMemMap(P at, size_t n, size_t offset, uint64_t h, uint64_t flags) { return do_map(at, n, offset, h, flags); }
int cuMemUnmap(P at, size_t n) { return do_unmap(at, n); }
int cuMemSetAccess(P at, size_t n, const Access *a, size_t count) { return do_access(at, n, a, count); }
int cuMemGetAddressRange(P *base, size_t *n, P at) { return do_range(base, n, at); }
int cuMemRetainAllocationHandle(uint64_t *out, void *at) { return do_retain(out, (uint64_t)at); }
int cuCtxSynchronize(void) { NEED; NOT_CAPTURED; wait_for_all(); return OK; }
int cuMemAlloc(P *p, size_t n) { return do_alloc((void **)p, n, 1); }
int cuMemFree(P p) { return do_free(p); }
int cuMemsetD8Async(P p, unsigned char b, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(p, n)) return INVALID_VALUE; memset((void *)p, b, n); return OK; }
int cuMemcpyHtoDAsync(P p, const void *h, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(p, n)) return INVALID_VALUE; wait_for(s); memcpy((void *)p, h, n); return OK; }
int cuMemcpyDtoHAsync(void *h, P p, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(p, n)) return INVALID_VALUE; wait_for(s); memcpy(h, (void *)p, n); return OK; }
int cuMemcpyAsync(P a, P b, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(a, n) || !in_bounds(b, n)) return INVALID_VALUE; memmove((void *)a, (void *)b, n); return OK; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { say("cuMemHostAlloc %zu", n); return flags == 3 ? do_host_alloc(p, n) : INVALID_VALUE; }
int cuMemHostGetDevicePointer(P *d, void *h, unsigned flags) { return flags ? INVALID_VALUE : do_host_pointer((void **)d, h); }
int cuMemFreeHost(void *p) { say("cuMemFreeHost"); return do_host_free(p); }
int cuStreamCreate(void **s, unsigned flags) { if (flags != 1) return INVALID_VALUE; return do_handle(s); }
int cuStreamDestroy(void *s) { return do_handle_free(s); }
int cuStreamQuery(void *s) { return do_query(s); }
int cuEventCreate(void **e, unsigned flags) { if (flags) return INVALID_VALUE; return do_handle(e); }
int cuEventDestroy(void *e) { return do_handle_free(e); }
int cuEventRecord(void *e, void *s) { return do_record(e, s); }
int cuEventQuery(void *e) { return do_event_query(e); }
int cuEventElapsedTime(float *ms, void *a, void *b) { return do_elapsed(ms, a, b); }
int cuModuleLoadDataEx(void **m, const void *image, unsigned n, int *options, void **values) {
  char *log = 0;
  size_t size = 0;
  int lines = 0;
  for (unsigned i = 0; i < n; i++) {
    if (options[i] == 5) log = values[i];           /* CU_JIT_ERROR_LOG_BUFFER */
    if (options[i] == 6) size = (size_t)values[i];  /* CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES */
    if (options[i] == 13) lines = (int)(size_t)values[i];
  }
  if (lines != 1 || !log || size < 1024) return INVALID_VALUE;
  if (strstr(image, "syntax")) { snprintf(log, size, "ptxas application ptx input, line 3; error: syntax error near 'syntax'"); return INVALID_PTX; }
  return do_module_load(m, image);
}
int cuModuleUnload(void *m) { NEED; if (!valid_kernel(m)) return INVALID_HANDLE; ((Kernel *)m)->live = 0; say("cuModuleUnload"); return OK; }
int cuModuleGetFunction(void **f, void *m, const char *name) { NEED; if (!valid_kernel(m)) return INVALID_HANDLE; if (strcmp(((Kernel *)m)->name, name)) return NOT_FOUND; *f = m; return OK; }
#ifndef OLD
int cuFuncLoad(void *f) { NEED; if (!valid_kernel(f)) return INVALID_HANDLE; say("cuFuncLoad %s", ((Kernel *)f)->name); return OK; }
#endif
int cuFuncSetAttribute(void *f, int attribute, int v) { NEED; if (!valid_kernel(f) || attribute != 8 || v > 232448) return INVALID_VALUE; ((Kernel *)f)->allowed = v; say("cuFuncSetAttribute %d", v); return OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) { NEED; if (!valid_kernel(f)) return INVALID_HANDLE; *n = 2048 / threads; say("cuOccupancy %zu", shared); return OK; }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned shared, void *s, void **params, void **extra) {
  if (extra) return INVALID_VALUE;
  unsigned dims[] = {a, b, c, d, e, g, shared};
  return do_launch("cuLaunchKernel", f, dims, s, params);
}
typedef struct { char bytes[64]; } Ipc;
int cuIpcGetMemHandle(Ipc *h, P p) { return do_ipc_get(h->bytes, p); }
int cuIpcOpenMemHandle(P *p, Ipc h, unsigned flags) { return do_ipc_open((void **)p, h.bytes, flags); }
int cuIpcCloseMemHandle(P p) { return do_ipc_close(p); }
int cuDeviceCanAccessPeer(int *can, int a, int b) { return do_can_access(can, a, b); }
int cuCtxEnablePeerAccess(void *c, unsigned flags) {
  NEED;
  int other = (int)((uint64_t)c - CONTEXT_MAGIC);
  if (flags || other == current) return INVALID_VALUE;
  if (peer[current][other]++) return PEER_ALREADY;
  say("cuCtxEnablePeerAccess %d->%d", current, other);
  return OK;
}
int cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status) {
  static void *self;
  Dl_info info;
  if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW);
  *out = dlsym(self, symbol);
  if (!strcmp(symbol, "cuGetProcAddress")) *out = (void *)cuGetProcAddress_v2;
  if (status) *status = *out ? 0 : 1;
  return *out ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags, int *status) { return cuGetProcAddress_v2(symbol, out, version, flags, status); }
#endif

#ifdef HIP
typedef struct { char bytes[64]; } Ipc;
/* hip_runtime_api.h, hipDeviceProp_tR0600 */
typedef struct {
  char name[256]; char uuid[16]; char luid[8]; unsigned luidDeviceNodeMask; size_t totalGlobalMem, sharedMemPerBlock; int regsPerBlock, warpSize;
  size_t memPitch; int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate; size_t totalConstMem; int major, minor;
  size_t textureAlignment, texturePitchAlignment; int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory, computeMode,
  maxTexture1D, maxTexture1DMipmap, maxTexture1DLinear, maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3],
  maxTexture3DAlt[3], maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2], maxSurface1D, maxSurface2D[2],
  maxSurface3D[3], maxSurface1DLayered[2], maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2]; size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing, memoryClockRate, memoryBusWidth,
  l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor; int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported,
  singleToDoublePrecisionPerfRatio, pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem,
  cooperativeLaunch, cooperativeMultiDeviceLaunch; size_t sharedMemPerBlockOptin; int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost,
  maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize; size_t reservedSharedMemPerBlock; int hostRegisterSupported, sparseHipArraySupported,
  hostRegisterReadOnlySupported, timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported; unsigned gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering; unsigned memoryPoolSupportedHandleTypes; int deferredMappingHipArraySupported, ipcEventSupported, clusterLaunch,
  unifiedFunctionPointers, reserved[63], hipReserved[32]; char gcnArchName[256];
} Props;
int hipInit(unsigned flags) { return OK; }
const char *hipGetErrorName(int e) { return errors[error_index(e)].hip; }
const char *hipGetErrorString(int e) { return errors[error_index(e)].text; }
int hipGetDeviceCount(int *n) { *n = DEVICES; return OK; }
int hipSetDevice(int d) { if (d < 0 || d >= DEVICES) return INVALID_DEVICE; retained[d] = 1; current = d; return OK; }
#ifdef OLD
#define hipGetDevicePropertiesR0600 hipGetDeviceProperties
#endif
int hipGetDevicePropertiesR0600(Props *p, int d) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, 256, "stand-in %d", d);
  strcpy(p->gcnArchName, "gfx942:sramecc+:xnack-");
  p->pciBusID = 0xc3 + d, p->totalGlobalMem = 1ull << 30, p->sharedMemPerBlock = 65536, p->warpSize = 64, p->maxThreadsPerBlock = 1024, p->multiProcessorCount = 304;
  return OK;
}
int hipRuntimeGetVersion(int *v) { *v = hip_version(); return OK; }
int hipDeviceGetUuid(char *out, int d) { if (getenv("STANDIN_NO_UUID")) { memset(out, 0, 16); strcpy(out, "XX"); return OK; } return do_uuid(out, d); }
int hipStreamBeginCapture(void *s, int mode) { return do_capture_begin(s, mode); }
int hipStreamEndCapture(void *s, void **graph) { return do_capture_end(s, graph); }
int hipGraphInstantiate(void **out, void *graph, void **node, char *log, size_t n) { *node = 0; return do_instantiate(out, graph); }
int hipGraphLaunch(void *graph, void *s) { return do_graph_launch(graph, s); }
int hipGraphDestroy(void *graph) { return do_graph_free(graph); }
int hipGraphExecDestroy(void *graph) { say("hipGraphExecDestroy"); return do_graph_free(graph); }
int hipMemGetAllocationGranularity(size_t *out, const Properties *p, int option) { return option == 1 ? do_granularity(out, p) : INVALID_VALUE; }
int hipMemCreate(uint64_t *out, size_t n, const Properties *p, uint64_t flags) { return do_mem_create(out, n, p, flags); }
int hipMemExportToShareableHandle(void *out, uint64_t h, int type, uint64_t flags) { return do_mem_export(out, h, type, flags); }
int hipMemImportFromShareableHandle(uint64_t *out, void *shared, int type) { return do_mem_import(out, hip_version() >= 70100000 ? (int)(uint64_t)shared : *(int *)shared, type); }
int hipMemRelease(uint64_t h) { return do_mem_release(h); }
int hipMemAddressReserve(void **out, size_t n, size_t alignment, void *where, uint64_t flags) { return do_reserve((uint64_t *)out, n, alignment, flags); }
int hipMemAddressFree(void *at, size_t n) { return do_unreserve((uint64_t)at, n); }
int hipMemMap(void *at, size_t n, size_t offset, uint64_t h, uint64_t flags) { return do_map((uint64_t)at, n, offset, h, flags); }
int hipMemUnmap(void *at, size_t n) { return do_unmap((uint64_t)at, n); }
int hipMemSetAccess(void *at, size_t n, const Access *a, size_t count) { return do_access((uint64_t)at, n, a, count); }
int hipMemGetAddressRange(void **base, size_t *n, void *at) { return do_range((uint64_t *)base, n, (uint64_t)at); }
int hipDeviceSynchronize(void) { NEED; NOT_CAPTURED; wait_for_all(); return OK; }
int hipMalloc(void **p, size_t n) { return do_alloc(p, n, 0); }
int hipExtMallocWithFlags(void **p, size_t n, unsigned flags) { return flags == 3 ? do_alloc(p, n, 1) : INVALID_VALUE; }
int hipFree(void *p) { return do_free((uint64_t)p); }
int hipMemsetAsync(void *p, int b, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds((uint64_t)p, n)) return INVALID_VALUE; if (sim_busy) wait_for(s); memset(p, b, n); return OK; }
int hipMemcpyAsync(void *a, const void *b, size_t n, int kind, void *s) {
  NEED;
  if (kind != 4 || sim_busy) wait_for(s);
  if (!valid_handle(s)) return INVALID_HANDLE;
  int to = in_bounds((uint64_t)a, n), from = in_bounds((uint64_t)b, n);
  if (!((kind == 1 && to && !from) || (kind == 2 && !to && from) || (kind == 4 && to && from))) return INVALID_VALUE;
  memmove(a, b, n);
  return OK;
}
int hipHostMalloc(void **p, size_t n, unsigned flags) { say("hipHostMalloc %zu", n); return flags == (1u | 2u | 0x40000000u) ? do_host_alloc(p, n) : INVALID_VALUE; }
int hipHostGetDevicePointer(void **d, void *h, unsigned flags) { return flags ? INVALID_VALUE : do_host_pointer(d, h); }
int hipHostFree(void *p) { say("hipHostFree"); return do_host_free(p); }
int hipStreamCreateWithFlags(void **s, unsigned flags) { if (flags != 1) return INVALID_VALUE; return do_handle(s); }
int hipStreamDestroy(void *s) { return do_handle_free(s); }
int hipStreamQuery(void *s) { return do_query(s); }
int hipEventCreate(void **e) { return do_handle(e); }
int hipEventDestroy(void *e) { return do_handle_free(e); }
int hipEventRecord(void *e, void *s) { return do_record(e, s); }
int hipEventQuery(void *e) { return do_event_query(e); }
int hipEventElapsedTime(float *ms, void *a, void *b) { return do_elapsed(ms, a, b); }
int hipModuleLoadData(void **m, const void *image) { return do_module_load(m, image); }
int hipModuleUnload(void *m) { NEED; if (!valid_kernel(m)) return INVALID_HANDLE; ((Kernel *)m)->live = 0; say("hipModuleUnload"); return OK; }
int hipModuleGetFunction(void **f, void *m, const char *name) { NEED; if (!valid_kernel(m)) return INVALID_HANDLE; if (strcmp(((Kernel *)m)->name, name)) return NOT_FOUND; *f = m; return OK; }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) { NEED; if (!valid_kernel(f)) return INVALID_HANDLE; *n = 2048 / threads; say("hipOccupancy %zu", shared); return OK; }
int hipModuleLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned shared, void *s, void **params, void **extra) {
  if (extra) return INVALID_VALUE;
  unsigned dims[] = {a, b, c, d, e, g, shared};
  return do_launch("hipModuleLaunchKernel", f, dims, s, params);
}
int hipIpcGetMemHandle(Ipc *h, void *p) { return do_ipc_get(h->bytes, (uint64_t)p); }
int hipIpcOpenMemHandle(void **p, Ipc h, unsigned flags) { return do_ipc_open(p, h.bytes, flags); }
int hipIpcCloseMemHandle(void *p) { return do_ipc_close((uint64_t)p); }
int hipDeviceCanAccessPeer(int *can, int a, int b) { return do_can_access(can, a, b); }
int hipDeviceEnablePeerAccess(int other, unsigned flags) {
  NEED;
  if (flags || other == current) return INVALID_VALUE;
  if (peer[current][other]++) return PEER_ALREADY;
  say("hipDeviceEnablePeerAccess %d->%d", current, other);
  return OK;
}
#endif
