/* Three functions of an emulator's bmlib, loaded before it, so that BMRuntime finds these.
 *
 * bm_dev_request: every device number is the emulator's one device. BMRuntime requests devices by number for bmodels
 * that run on several, and the emulator's bmlib ends the process over any number but 0.
 *
 * bm_malloc_device_byte_u64, bm_free_device_u64: memory for weights and for working, decided by child/working_memory.py.
 */

#include <stdint.h>

typedef struct {
  uint64_t address;
  uint32_t reserved;
  int32_t dmabuf_fd;
  uint32_t flags;
  uint64_t size;
} memory; /* bm_device_mem_u64_t */

static int (*request)(void **handle, int device);
static int (*allocate)(void *handle, memory *made, uint64_t size);
static void (*release)(void *handle, const memory *made);

void dlinfer_set_functions(int (*requesting)(void **, int), int (*allocating)(void *, memory *, uint64_t),
                           void (*releasing)(void *, const memory *)) {
  request = requesting;
  allocate = allocating;
  release = releasing;
}

int bm_dev_request(void **handle, int device) {
  (void)device;
  return request(handle, 0);
}

int bm_malloc_device_byte_u64(void *handle, memory *made, uint64_t size) { return allocate(handle, made, size); }

void bm_free_device_u64(void *handle, memory made) { release(handle, &made); }
