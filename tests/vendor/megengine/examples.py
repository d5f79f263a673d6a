"""The code examples of MegEngine Lite's document (its Python interface), word for word, but for their indentation.

Only the module's name is another: they run where ``from dlinfer.vendor.megengine.lite import *`` was said.
"""

TENSORS = """
# 直接从 shapes 创建 LiteTensor
tensor_cuda2 = LiteTensor(shapes=[4,16], dtype="float32", device_type=LiteDeviceType.LITE_CUDA)

# 从 layout 创建 LiteTensor
layout = LiteLayout([4, 16], "float32")
tensor = LiteTensor(layout, LiteDeviceType.LITE_CPU)
tensor_cuda = LiteTensor(layout=layout, device_type=LiteDeviceType.LITE_CUDA)
"""

SLICE = """
layout = LiteLayout([4, 8], "int32")
tensor1 = LiteTensor(layout)
tensor1.set_data_by_copy([i for i in range(32)])
real_data_org = tensor1.to_numpy()
tensor2 = tensor1.slice([1, 4], [3, 8])
assert tensor2.layout.shapes[0] == 2
assert tensor2.layout.shapes[1] == 4
assert tensor2.is_continue == False
real_data = tensor2.to_numpy()
for i in range(8):
    row = i // 4
    col = i % 4
    assert real_data[row][col] == real_data_org[row + 1][col + 4]
"""

SHARE_MEMORY_WITH = """
layout = LiteLayout([4, 8], "int16")
tensor1 = LiteTensor(layout)
tensor2 = LiteTensor(layout)
tensor1.set_data_by_copy([i for i in range(32)])
tensor2.share_memory_with(tensor1)
real_data = tensor2.to_numpy()
for i in range(32):
    assert real_data[i // 8][i % 8] == i
"""

SET_DATA_BY_COPY = """
layout = LiteLayout([2, 16], "int8")
tensor = LiteTensor(layout)
data = [i for i in range(32)]
tensor.set_data_by_copy(data)
real_data = tensor.to_numpy()
for i in range(32):
    assert real_data[i // 16][i % 16] == i
"""

SET_DATA_BY_SHARE = """
layout = LiteLayout([2, 16], "int8")
tensor = LiteTensor(layout)
arr = np.ones([2, 16], "int8")
for i in range(32):
    arr[i // 16][i % 16] = i
tensor.set_data_by_share(arr)
real_data = tensor.to_numpy()
for i in range(32):
    assert real_data[i // 16][i % 16] == i
"""

GET_DATA_BY_SHARE = """
layout = LiteLayout([4, 32], "int16")
tensor = LiteTensor(layout)
assert tensor.nbytes == 4 * 32 * 2
arr = np.ones([4, 32], "int16")
for i in range(128):
    arr[i // 32][i % 32] = i
tensor.set_data_by_copy(arr)
test_data = tensor.get_data_by_share()
for i in range(128):
    assert test_data[i // 32][i % 32] == i
arr[1][18] = 5
arr[3][7] = 345
tensor.set_data_by_copy(arr)
assert test_data[1][18] == 5
assert test_data[3][7] == 345
"""

NETWORK_IO = """
input_io1 = LiteIO("data1", is_host=False, io_type=LiteIOType.LITE_IO_VALUE)
input_io2 = LiteIO(
    "data2",
    is_host=True,
    io_type=LiteIOType.LITE_IO_SHAPE,
    layout=LiteLayout([2, 4, 4]),
)
io = LiteNetworkIO([input_io1, input_io2])
io.add_output("out1", is_host=False)
io.add_output("out2", is_host=True, layout=LiteLayout([1, 1000]))
assert len(io.inputs) == 2
assert len(io.outputs) == 2
"""

NETWORK = """
config = LiteConfig()
config.options.var_sanity_check_first_run = 0
config.device_type = LiteDeviceType.LITE_CUDA
ios = LiteNetworkIO(inputs=[LiteIO("data", False)])
network = LiteNetwork(config=config, io=ios)
"""

# Inside a function, as its ``nonlocal`` wants; the document leaves model_path, inputs and output_tensor to the reader.
ASYNC_WITH_CALLBACK = """
count = 0
finished = False
def async_callback():
    nonlocal finished
    finished = True
    return 0
config = LiteConfig()
config.options.var_sanity_check_first_run = 0
network = LiteNetwork(config=config)
network.load(model_path)
network.async_with_callback(async_callback)
{inputs}
network.forward()
while not finished:
    count += 1
assert count > 0
output_data = output_tensor.to_numpy()
"""

FINISH_CALLBACK = """
network = LiteNetwork()
network.load(model_path)
{inputs}
finish_checked = False
def finish_callback(ios):
    nonlocal finish_checked
    finish_checked = True
    assert len(ios) == 1
    for key in ios:
        io = key
        data = ios[key].to_numpy().flatten()
        output_data = self.correct_data.flatten()
        ...
    return 0
network.set_finish_callback(finish_callback)
network.forward()
network.wait()
assert finish_checked == True
"""

DECRYPTION = """
@decryption_func
def function(in_arr, key_arr, out_arr):
    if not out_arr:
        return in_arr.size
    else:
        for i in range(in_arr.size):
            out_arr[i] = in_arr[i] ^ key_arr[0] ^ key_arr[0]
        return out_arr.size
LiteGlobal.register_decryption_and_key("just_for_test", function, [15])
config = LiteConfig()
config.bare_model_cryption_name = "just_for_test".encode("utf-8")
network = LiteNetwork(config)
model_path = os.path.join(self.source_dir, "shufflenet.mge")
network.load(model_path)
"""

UPDATE_KEY = """
wrong_key = [0] * 32
LiteGlobal.update_decryption_key("AES_default", wrong_key)
with self.assertRaises(RuntimeError):
    config = LiteConfig()
    config.bare_model_cryption_name = "AES_default".encode("utf-8")
    network = LiteNetwork(config)
    model_path = os.path.join(self.source_dir, "shufflenet_crypt_aes.mge")
    network.load(model_path)
right_key = [i for i in range(32)]
LiteGlobal.update_decryption_key("AES_default", right_key)
config = LiteConfig()
config.bare_model_cryption_name = "AES_default".encode("utf-8")
network = LiteNetwork(config)
model_path = os.path.join(self.source_dir, "shufflenet_crypt_aes.mge")
network.load(model_path)
"""

COLLECT = """
batch_tensor = TensorBatchCollector(
    [4, 8, 8], dtype=LiteDataType.LITE_INT, device_type=LiteDeviceType.LITE_CUDA
)
arr = np.ones([8, 8], "int32")
for j in range(2):
    for i in range(4):
        batch_tensor.collect(arr)
        arr += 1
    batch_tensor.free(range(4))
data = batch_tensor.to_numpy()
assert data.shape[0] == 4
assert data.shape[1] == 8
assert data.shape[2] == 8
for i in range(4):
    for j in range(64):
        assert data[i][j // 8][j % 8] == i + 4 + 1
"""

COLLECT_ID = """
batch_tensor = TensorBatchCollector(
    [4, 8, 8], dtype=LiteDataType.LITE_INT, device_type=LiteDeviceType.LITE_CUDA
)
arr = np.ones([8, 8], "int32")
arr += 1  # ==2
batch_tensor.collect_id(arr, 1)
arr -= 1  # ==1
batch_tensor.collect_id(arr, 0)
arr += 2  # ==3
batch_tensor.collect_id(arr, 2)
arr += 1  # ==4
batch_tensor.collect_id(arr, 3)
data = batch_tensor.to_numpy()
batch_tensor.free(range(4))
assert data.shape[0] == 4
assert data.shape[1] == 8
assert data.shape[2] == 8
for i in range(4):
    for j in range(64):
        assert data[i][j // 8][j % 8] == i + 1
"""

COLLECT_INTO_A_TENSOR = """
all_tensor = LiteTensor(
    LiteLayout([4, 6, 8], dtype=LiteDataType.LITE_INT), device_type=LiteDeviceType.LITE_CUDA,
)
batch_tensor = TensorBatchCollector([4, 6, 8], tensor=all_tensor)
nparr = np.ones([6, 8], "int32")
for j in range(2):
    for i in range(4):
        batch_tensor.collect(nparr)
        nparr += 1
    batch_tensor.free(range(4))
data = batch_tensor.to_numpy()
assert data.shape[0] == 4
assert data.shape[1] == 6
assert data.shape[2] == 8
for i in range(4):
    for j in range(48):
        assert data[i][j // 8][j % 8] == i + 4 + 1
"""

COLLECT_TENSORS = """
batch_tensor = TensorBatchCollector(
    [4, 6, 8], dtype=LiteDataType.LITE_INT, device_type=LiteDeviceType.LITE_CPU
)
nparr = np.ones([6, 8], "int32")
tensor = LiteTensor(LiteLayout([6, 8], LiteDataType.LITE_INT))
for j in range(2):
    for i in range(4):
        tensor.set_data_by_share(nparr)
        batch_tensor.collect(tensor)
        nparr += 1
    batch_tensor.free(range(4))
data = batch_tensor.to_numpy()
assert data.shape[0] == 4
assert data.shape[1] == 6
assert data.shape[2] == 8
for i in range(4):
    for j in range(48):
        assert data[i][j // 8][j % 8] == i + 4 + 1
"""
