/* Gives every device number of an emulator the emulator's one device.
 *
 * BMRuntime requests devices by number for bmodels that run on several, and the emulator's bmlib ends the process over
 * any number but 0. Loaded before bmlib, this bm_dev_request is the one that BMRuntime finds. */

typedef int (*request)(void **handle, int device);

static request of_bmlib;

void dlinfer_set_request(request function) { of_bmlib = function; }

int bm_dev_request(void **handle, int device) {
  (void)device;
  return of_bmlib(handle, 0);
}
