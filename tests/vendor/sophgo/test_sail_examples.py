"""The examples of the document "sail.EngineLLM", and of sophon-sail's "sail.Tensor" and "sail.Handle", as written.

Only the module's path is changed: ``import sophon.sail as sail`` is ours.
"""

import contextlib
import io
import shutil

import pytest

from dlinfer import settings

MODULE = "import sophon.sail as sail"
OURS = "from dlinfer.vendor.sophgo import sail"

CONSTRUCTORS = """
import sophon.sail as sail
import os

if __name__ == '__main__':
    bmodel_path = "example_8dev.bmodel"
    dev_ids = [i for i in range(8)]
    engine1 = sail.EngineLLM(bmodel_path, dev_ids)

    file = open(bmodel_path,"rb")
    datas = file.read()
    file_size = os.path.getsize(bmodel_path)
    engine2 = sail.EngineLLM(datas, file_size, dev_ids)

    llm_bmodel_path = "llama.bmodel"
    flag = sail.BmrtFlag.BM_RUNTIME_SHARE_MEM
    engine3 = sail.EngineLLM(llm_bmodel_path, flag, dev_ids)
"""

PROCESS = """
import sophon.sail as sail

if __name__ == '__main__':
    bmodel_path = "example_8dev.bmodel"
    dev_ids = [i for i in range(8)]
    engine1 = sail.EngineLLM(bmodel_path, dev_ids)
    graph_name_0 = engine1.get_graph_names()[0]
    input_tensors = engine1.get_input_tensors(graph_name_0)
    output_tensors = engine1.get_output_tensors(graph_name_0)
    ret = engine1.process(graph_name_0, input_tensors, output_tensors)
    if (ret):
        print(f"{graph_name_0} inference failed!")
    else:
        print(f"{graph_name_0} inference succeeded!")
"""

GETTERS = """
import sophon.sail as sail

if __name__ == '__main__':
    bmodel_path = "example_8dev.bmodel"
    dev_ids: list[int] = [i for i in range(8)]
    engine1 = sail.EngineLLM(bmodel_path, dev_ids)

    dev_ids = engine1.get_device_ids()
    graph_names = engine1.get_graph_names()
    graph_name_0 = graph_names[0]
    query_index = 0
    query_stage = 0

    addr_mode = engine1.get_addr_mode(graph_name_0)
    stage_num = engine1.get_stage_num(graph_name_0)
    input_num = engine1.get_input_num(graph_name_0)
    is_dynamic = engine1.get_is_dynamic(graph_name_0)
    input_name = engine1.get_input_name(graph_name_0, query_index)
    input_tensor_devid = engine1.get_input_tensor_devid(
        graph_name_0, query_index)
    input_shape = engine1.get_input_shape(
        graph_name_0, query_index, query_stage)
    input_max_shape = engine1.get_input_max_shape(
        graph_name_0, query_index)
    input_dtype = engine1.get_input_dtype(graph_name_0, query_index)
    input_scale = engine1.get_input_scale(graph_name_0, query_index)
    # usage about output is omitted, which is the same as input
"""

TENSOR = """
import sophon.sail as sail
import numpy as np
if __name__ == '__main__':
    handle = sail.Handle(0)
    input = np.array([1, 2, 3])

    input_tensor1 = sail.Tensor(handle,input)
    input_tensor2 = sail.Tensor(handle,[1,2],sail.Dtype.BM_FLOAT32,True,True)
    print(input_tensor1.shape())
    print(input_tensor1.dtype())
    input_ = input_tensor1.asnumpy()
    input__ = input_tensor1.asnumpy((3,1))
    input_tensor1.scale_from(input,0.1)
    input_tensor1_ = input_tensor1.scale_to(0.1)
    input_tensor1__ = input_tensor1.scale_to(0.1,(3,1))
    input_tensor1_ = input_tensor1.reshape([3,1])
    print(input_tensor1.own_sys_data())
    print(input_tensor1.own_dev_data())
    input_tensor2.sync_s2d()
    input_tensor2.sync_s2d(1)
"""

PART = """
import sophon.sail as sail
import numpy as np
if __name__ == '__main__':
    handle = sail.Handle(0)
    height = 1080
    width = 1920
    data_type = sail.Dtype.BM_INT32
    src_shape = [1, 3, height, width]
    src_tensor = sail.Tensor(handle, src_shape, data_type, False, True)

    dst_shape = [1, 1, height, width]
    offset = height * width
    dst_tensor = sail.Tensor(src_tensor, dst_shape, offset)
"""

UPDATE = """
import sophon.sail as sail
import numpy as np

if __name__ == '__main__':
    dev_id = 0
    handle = sail.Handle(dev_id)

    tensor_fp32 = sail.Tensor(handle, [1,3,640,640], sail.BM_FLOAT32, True, True)
    np_fp32 = np.ones(tensor_fp32.shape(),dtype=np.float32)
    tensor_fp32.update_data(np_fp32)

    tensor_fp16 = sail.Tensor(handle, [1,3,640,640], sail.BM_FLOAT16, True, True)
    np_fp16 = np.ones(tensor_fp16.shape(),dtype=np.float16)
    tensor_fp16.update_data(np_fp16.view(np.uint16))
"""

SYNC = """
import sophon.sail as sail
import numpy as np
if __name__ == '__main__':
    handle = sail.Handle(0)
    handle_ = sail.Handle(1)

    input_tensor1 = sail.Tensor(handle,[1,3],sail.Dtype.BM_FLOAT32,False,True)
    input_tensor2 = sail.Tensor(handle_,[1,3],sail.Dtype.BM_FLOAT32,True,True)

    input_tensor1.ones()
    input_tensor2.sync_d2s()
    input_tensor2.sync_d2s(2)
    input_tensor2.sync_d2s(input_tensor1,0,0,2)
    input_tensor2.sync_d2d(input_tensor1,0,0,2)
    input_tensor1.memory_set(1)
    input_tensor1.zeros()
    print(input_tensor1.size())
    print(input_tensor1.element_size())
    print(input_tensor1.nbytes())
"""

HANDLE = """
import sophon.sail as sail
if __name__ == '__main__':
    tpu_id = 0
    handle = sail.Handle(tpu_id)
    print(handle.get_device_id(), handle.get_sn(), handle.get_target())
"""


@pytest.fixture
def example(bmodel, open_chips, tmp_path, monkeypatch):
    """Runs an example where its bmodels lie; gives what it printed and its names."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(bmodel("eight devices"), "example_8dev.bmodel")
    shutil.copy(bmodel("bm1688"), "llama.bmodel")

    def run(text: str) -> tuple[str, dict]:
        assert text.count(MODULE) == 1
        names = {"__name__": "__main__"}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text.replace(MODULE, OURS), "example", "exec"), names)
        return printed.getvalue(), names

    return run


def test_constructors(example):
    _, names = example(CONSTRUCTORS)
    assert all(names[f"engine{number}"].get_device_ids() == list(range(8)) for number in (1, 2, 3))
    names["file"].close()


def test_process(example):
    """On the memory of the graph's own."""
    printed, _ = example(PROCESS)
    assert printed == "mlp inference succeeded!\n"


def test_getters(example):
    _, names = example(GETTERS)
    assert names["input_tensor_devid"] == 0
    assert names["input_shape"] == names["input_max_shape"] == [1, 8, 16]
    assert (names["addr_mode"], names["stage_num"], names["is_dynamic"]) == (1, 1, False)


@pytest.mark.parametrize("text", [TENSOR, PART, UPDATE, SYNC], ids=["tensor", "part", "update", "sync"])
def test_tensors(example, text):
    with settings.override(sophgo_emulate="bm1684x"):
        example(text)


def test_handle(example):
    with settings.override(sophgo_emulate="bm1684x"):
        printed, _ = example(HANDLE)
    assert printed == "0  BM1684X\n"
