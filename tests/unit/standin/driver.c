/* A stand-in for libcuda.so.1 (-DCUDA) and libamdhip64.so (-DHIP), for tests on machines without a GPU.

   It has two devices whose memory is host memory (files, so that another process can open it through an IPC handle), checks what a driver
   checks (a current context, known addresses, known handles), and writes every call into $STANDIN_DIR/log.<pid>. A module's image is text:
   "KERNEL <name> <parameter size> ...". A launch copies the parameters into the log. A kernel named "fault" writes the fault record
   (kind 1, the site word in its first parameter) into the context its last parameter points to; one named "crash" does so too and leaves
   the device with an error. */
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
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_PTX = 218,
       INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, PEER_ALREADY = 704 };

#define DEVICES 2
#define MAX 4096
#define CONTEXT_MAGIC 0xC0DE0000u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current = -1; /* device whose context is current on this thread */
static int retained[DEVICES], sticky[DEVICES], peer[DEVICES][DEVICES];

typedef struct { char *at; size_t size; int device; char path[64]; int opened; } Memory;
typedef struct { int device; int live; char name[64]; int sizes[64]; int count; } Kernel;
static Memory memories[MAX];
static Kernel kernels[MAX];
static int memory_count, kernel_count, handle_count, handle_live[MAX], file_count;

static const char *directory(void) { const char *d = getenv("STANDIN_DIR"); return d ? d : "/tmp"; }

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

static Memory *find(uint64_t address) {
  for (int i = 0; i < memory_count; i++)
    if (memories[i].at && address >= (uint64_t)memories[i].at && address < (uint64_t)memories[i].at + memories[i].size) return &memories[i];
  return 0;
}

static int in_bounds(uint64_t address, size_t n) {
  Memory *m = find(address);
  return m && address + n <= (uint64_t)m->at + m->size;
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

static int do_alloc(void **out, size_t size) {
  NEED;
  if (!size) return INVALID_VALUE;
  if (size > (1u << 30)) return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  Memory *m = &memories[memory_count++];
  snprintf(m->path, sizeof m->path, "%s/m%d_%d", directory(), getpid(), file_count++);
  m->at = map_file(m->path, size, 1);
  m->size = size, m->device = current, m->opened = 0;
  *out = m->at;
  pthread_mutex_unlock(&lock);
  return m->at ? OK : OUT_OF_MEMORY;
}

static int do_free(uint64_t address) {
  NEED;
  Memory *m = find(address);
  if (!m || (uint64_t)m->at != address || m->opened) return INVALID_VALUE;
  munmap(m->at, m->size);
  unlink(m->path);
  m->at = 0;
  return OK;
}

static int do_ipc_get(char *handle, uint64_t address) {
  NEED;
  Memory *m = find(address);
  if (!m || (uint64_t)m->at != address) return INVALID_VALUE;
  memset(handle, 0, 64);
  strcpy(handle, m->path);
  return OK;
}

static int do_ipc_open(void **out, const char *handle, unsigned flags) {
  NEED;
  if (flags != 1) return INVALID_VALUE;
  struct stat s;
  if (stat(handle, &s)) return INVALID_HANDLE;
  Memory *m = &memories[memory_count++];
  strcpy(m->path, handle);
  m->at = map_file(handle, 0, 0);
  m->size = s.st_size, m->device = current, m->opened = 1;
  *out = m->at;
  return m->at ? OK : INVALID_HANDLE;
}

static int do_ipc_close(uint64_t address) {
  NEED;
  Memory *m = find(address);
  if (!m || !m->opened) return INVALID_VALUE;
  munmap(m->at, m->size);
  m->at = 0;
  return OK;
}

static int do_module_load(void **out, const char *image) {
  NEED;
  char text[512];
  snprintf(text, sizeof text, "%.500s", image);
  char *save, *word = strtok_r(text, " \n", &save);
  if (!word || strcmp(word, "KERNEL")) return INVALID_IMAGE;
  Kernel *k = &kernels[++kernel_count];
  memset(k, 0, sizeof *k);
  strcpy(k->name, strtok_r(0, " \n", &save));
  while ((word = strtok_r(0, " \n", &save))) k->sizes[k->count++] = atoi(word);
  k->device = current, k->live = 1;
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
  say("%s", line);
  if ((!strcmp(k->name, "fault") || !strcmp(k->name, "crash")) && first) {
    volatile uint64_t *w = (uint64_t *)last;
    uint64_t at = 8 + 8 * w[1]++;
    w[at] = 1, w[at + 1] = first, w[at + 2] = 2, w[at + 3] = 3, w[at + 4] = 0x1000, w[at + 5] = 5, w[at + 6] = 6, w[at + 7] = 1;
  }
  if (!strcmp(k->name, "crash")) sticky[current] = ILLEGAL_ADDRESS;
  return OK;
}

static const char *error_name(int e, int text) {
  switch (e) {
    case OK: return text ? "no error" : "SUCCESS";
    case INVALID_VALUE: return text ? "invalid argument" : "INVALID_VALUE";
    case OUT_OF_MEMORY: return text ? "out of memory" : "OUT_OF_MEMORY";
    case INVALID_IMAGE: return text ? "device kernel image is invalid" : "INVALID_IMAGE";
    case INVALID_CONTEXT: return text ? "invalid device context" : "INVALID_CONTEXT";
    case INVALID_PTX: return text ? "a PTX JIT compilation failed" : "INVALID_PTX";
    case INVALID_HANDLE: return text ? "invalid resource handle" : "INVALID_HANDLE";
    case ILLEGAL_ADDRESS: return text ? "an illegal memory access was encountered" : "ILLEGAL_ADDRESS";
    default: return text ? "another error" : "OTHER";
  }
}
static char name_buffer[64];

#ifdef CUDA
typedef uint64_t P;
int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
int cuGetErrorName(int e, const char **out) { snprintf(name_buffer, 64, "CUDA_ERROR_%s", error_name(e, 0)); *out = name_buffer; return OK; }
int cuGetErrorString(int e, const char **out) { *out = error_name(e, 1); return OK; }
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
int cuCtxSynchronize(void) { NEED; return OK; }
int cuMemAlloc(P *p, size_t n) { return do_alloc((void **)p, n); }
int cuMemFree(P p) { return do_free(p); }
int cuMemsetD8Async(P p, unsigned char b, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(p, n)) return INVALID_VALUE; memset((void *)p, b, n); return OK; }
int cuMemcpyHtoDAsync(P p, const void *h, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(p, n)) return INVALID_VALUE; memcpy((void *)p, h, n); return OK; }
int cuMemcpyDtoHAsync(void *h, P p, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(p, n)) return INVALID_VALUE; memcpy(h, (void *)p, n); return OK; }
int cuMemcpyAsync(P a, P b, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds(a, n) || !in_bounds(b, n)) return INVALID_VALUE; memmove((void *)a, (void *)b, n); return OK; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { NEED; if (flags != 3) return INVALID_VALUE; *p = calloc(1, n); say("cuMemHostAlloc %zu", n); return OK; }
int cuMemHostGetDevicePointer(P *d, void *h, unsigned flags) { NEED; if (flags) return INVALID_VALUE; *d = (P)h; return OK; }
int cuMemFreeHost(void *p) { NEED; free(p); say("cuMemFreeHost"); return OK; }
int cuStreamCreate(void **s, unsigned flags) { if (flags != 1) return INVALID_VALUE; return do_handle(s); }
int cuStreamDestroy(void *s) { return do_handle_free(s); }
int cuStreamSynchronize(void *s) { NEED; return valid_handle(s) ? OK : INVALID_HANDLE; }
int cuEventCreate(void **e, unsigned flags) { if (flags) return INVALID_VALUE; return do_handle(e); }
int cuEventDestroy(void *e) { return do_handle_free(e); }
int cuEventRecord(void *e, void *s) { NEED; return e && valid_handle(e) && valid_handle(s) ? OK : INVALID_HANDLE; }
int cuEventSynchronize(void *e) { NEED; return e && valid_handle(e) ? OK : INVALID_HANDLE; }
int cuEventElapsedTime(float *ms, void *a, void *b) { NEED; *ms = (float)((uint64_t)b - (uint64_t)a) / 2; return valid_handle(a) && valid_handle(b) ? OK : INVALID_HANDLE; }
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
int cuFuncLoad(void *f) { NEED; if (!valid_kernel(f)) return INVALID_HANDLE; say("cuFuncLoad %s", ((Kernel *)f)->name); return OK; }
int cuFuncSetAttribute(void *f, int attribute, int v) { NEED; if (!valid_kernel(f) || attribute != 8) return INVALID_VALUE; say("cuFuncSetAttribute %d", v); return OK; }
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
int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
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
const char *hipGetErrorName(int e) { snprintf(name_buffer, 64, "hipError_%s", error_name(e, 0)); return name_buffer; }
const char *hipGetErrorString(int e) { return error_name(e, 1); }
int hipGetDeviceCount(int *n) { *n = DEVICES; return OK; }
int hipSetDevice(int d) { if (d < 0 || d >= DEVICES) return INVALID_DEVICE; retained[d] = 1; current = d; return OK; }
int hipGetDevicePropertiesR0600(Props *p, int d) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, 256, "stand-in %d", d);
  strcpy(p->gcnArchName, "gfx942:sramecc+:xnack-");
  p->totalGlobalMem = 1ull << 30, p->sharedMemPerBlock = 65536, p->warpSize = 64, p->maxThreadsPerBlock = 1024, p->multiProcessorCount = 304;
  return OK;
}
int hipDeviceSynchronize(void) { NEED; return OK; }
int hipMalloc(void **p, size_t n) { return do_alloc(p, n); }
int hipFree(void *p) { return do_free((uint64_t)p); }
int hipMemsetAsync(void *p, int b, size_t n, void *s) { NEED; if (!valid_handle(s)) return INVALID_HANDLE; if (!in_bounds((uint64_t)p, n)) return INVALID_VALUE; memset(p, b, n); return OK; }
int hipMemcpyAsync(void *a, const void *b, size_t n, int kind, void *s) {
  NEED;
  if (!valid_handle(s)) return INVALID_HANDLE;
  int to = in_bounds((uint64_t)a, n), from = in_bounds((uint64_t)b, n);
  if (!((kind == 1 && to && !from) || (kind == 2 && !to && from) || (kind == 4 && to && from))) return INVALID_VALUE;
  memmove(a, b, n);
  return OK;
}
int hipHostMalloc(void **p, size_t n, unsigned flags) { NEED; if (flags != (1u | 2u | 0x40000000u)) return INVALID_VALUE; *p = calloc(1, n); say("hipHostMalloc %zu", n); return OK; }
int hipHostGetDevicePointer(void **d, void *h, unsigned flags) { NEED; if (flags) return INVALID_VALUE; *d = h; return OK; }
int hipHostFree(void *p) { NEED; free(p); say("hipHostFree"); return OK; }
int hipStreamCreateWithFlags(void **s, unsigned flags) { if (flags != 1) return INVALID_VALUE; return do_handle(s); }
int hipStreamDestroy(void *s) { return do_handle_free(s); }
int hipStreamSynchronize(void *s) { NEED; return valid_handle(s) ? OK : INVALID_HANDLE; }
int hipEventCreate(void **e) { return do_handle(e); }
int hipEventDestroy(void *e) { return do_handle_free(e); }
int hipEventRecord(void *e, void *s) { NEED; return e && valid_handle(e) && valid_handle(s) ? OK : INVALID_HANDLE; }
int hipEventSynchronize(void *e) { NEED; return e && valid_handle(e) ? OK : INVALID_HANDLE; }
int hipEventElapsedTime(float *ms, void *a, void *b) { NEED; *ms = (float)((uint64_t)b - (uint64_t)a) / 2; return valid_handle(a) && valid_handle(b) ? OK : INVALID_HANDLE; }
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
int hipDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
int hipDeviceEnablePeerAccess(int other, unsigned flags) {
  NEED;
  if (flags || other == current) return INVALID_VALUE;
  if (peer[current][other]++) return PEER_ALREADY;
  say("hipDeviceEnablePeerAccess %d->%d", current, other);
  return OK;
}
#endif
