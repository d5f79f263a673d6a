// VCVTPH2PSX and VCVTPS2PHX, which AVX-512 FP16 adds, for a CPU that lacks them: the handler of SIGILL computes what
// the instruction would have, by F16C, and goes on behind it. Any other unknown instruction ends the process.

#include <cpuid.h>
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

unsigned ymm_at, opmask_at, zmm_high_at, zmm_16_at;  // offsets in the state that a signal saves
constexpr unsigned XMM_AT = 160, STATE_IN_USE_AT = 512;
constexpr uint64_t AVX512_STATE = 0xe7;

unsigned offset_of(unsigned component) {
    unsigned a, b, c, d;
    __cpuid_count(0xd, component, a, b, c, d);
    return b;
}

void read_zmm(const char *state, unsigned index, uint8_t *to) {
    if (index >= 16) {
        memcpy(to, state + zmm_16_at + 64 * (index - 16), 64);
        return;
    }
    memcpy(to, state + XMM_AT + 16 * index, 16);
    memcpy(to + 16, state + ymm_at + 16 * index, 16);
    memcpy(to + 32, state + zmm_high_at + 32 * index, 32);
}

void write_zmm(char *state, unsigned index, const uint8_t *from) {
    if (index >= 16) {
        memcpy(state + zmm_16_at + 64 * (index - 16), from, 64);
        return;
    }
    memcpy(state + XMM_AT + 16 * index, from, 16);
    memcpy(state + ymm_at + 16 * index, from + 16, 16);
    memcpy(state + zmm_high_at + 32 * index, from + 32, 32);
}

const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                           REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

[[noreturn]] void unknown(const uint8_t *code) {
    char text[100];
    int n = snprintf(text, sizeof text, "an instruction that is not modelled:");
    for (int i = 0; i < 12; i++) n += snprintf(text + n, sizeof text - n, " %02x", code[i]);
    text[n++] = '\n';
    (void)!write(2, text, n);
    _exit(99);
}

int32_t number(const uint8_t *&code) {
    int32_t value;
    memcpy(&value, code, 4);
    code += 4;
    return value;
}

// The address of an EVEX memory operand; ``next`` comes at what follows ModRM and leaves behind the displacement.
uint64_t address_of(const greg_t *registers, const uint8_t *code, const uint8_t *&next, unsigned scale) {
    unsigned x = !(code[1] & 0x40), b = !(code[1] & 0x20), mod = code[5] >> 6, rm = code[5] & 7;
    uint64_t address = 0;
    if (rm == 5 && mod == 0) {
        int32_t displacement = number(next);
        return reinterpret_cast<uint64_t>(next) + displacement;
    }
    if (rm != 4) {
        address = registers[REGISTERS[rm | b << 3]];
    } else {
        uint8_t sib = *next++;
        unsigned index = ((sib >> 3) & 7) | x << 3;
        if (index != 4) address += static_cast<uint64_t>(registers[REGISTERS[index]]) << (sib >> 6);
        if ((sib & 7) == 5 && mod == 0) return address + number(next);
        address += registers[REGISTERS[(sib & 7) | b << 3]];
    }
    if (mod == 1) return address + static_cast<int64_t>(static_cast<int8_t>(*next++)) * scale;
    return mod == 2 ? address + number(next) : address;
}

__attribute__((target("f16c"))) void on_unknown_instruction(int, siginfo_t *, void *given) {
    auto *context = static_cast<ucontext_t *>(given);
    greg_t *registers = context->uc_mcontext.gregs;
    char *state = reinterpret_cast<char *>(context->uc_mcontext.fpregs);
    const auto *code = reinterpret_cast<const uint8_t *>(registers[REG_RIP]);
    bool known = code[0] == 0x62 && (code[2] & 0x83) == 1;  // EVEX, W 0, prefix 66
    bool widens = known && (code[1] & 7) == 6 && code[4] == 0x13;
    bool narrows = known && (code[1] & 7) == 5 && code[4] == 0x1d;
    if (!widens && !narrows) unknown(code);

    unsigned mod = code[5] >> 6;
    unsigned target_index = ((code[5] >> 3) & 7) | !(code[1] & 0x80) << 3 | !(code[1] & 0x10) << 4;
    bool repeats = code[3] & 0x10, zeroes = code[3] & 0x80;
    if (mod == 3 && repeats) unknown(code);  // a rounding of its own
    unsigned lanes = 4u << ((code[3] >> 5) & 3), from_size = widens ? 2 : 4, to_size = widens ? 4 : 2;
    uint64_t mask = code[3] & 7 ? *reinterpret_cast<uint64_t *>(state + opmask_at + 8 * (code[3] & 7)) : ~0ull;

    uint8_t source[64] = {}, target[64];
    const uint8_t *next = code + 6;
    if (mod == 3) {
        read_zmm(state, (code[5] & 7) | !(code[1] & 0x20) << 3 | !(code[1] & 0x40) << 4, source);
    } else {
        auto *memory = reinterpret_cast<const uint8_t *>(
            address_of(registers, code, next, repeats ? from_size : from_size * lanes));
        for (unsigned i = 0; i < lanes; i++)
            if (mask >> i & 1) memcpy(source + i * from_size, memory + (repeats ? 0 : i * from_size), from_size);
    }
    read_zmm(state, target_index, target);
    for (unsigned i = 0; i < lanes; i++) {
        if (!(mask >> i & 1)) {
            if (zeroes) memset(target + to_size * i, 0, to_size);
        } else if (widens) {
            uint16_t half;
            memcpy(&half, source + 2 * i, 2);
            float single = _cvtsh_ss(half);
            memcpy(target + 4 * i, &single, 4);
        } else {
            float single;
            memcpy(&single, source + 4 * i, 4);
            uint16_t half = _cvtss_sh(single, _MM_FROUND_TO_NEAREST_INT);
            memcpy(target + 2 * i, &half, 2);
        }
    }
    memset(target + to_size * lanes, 0, 64 - to_size * lanes);
    *reinterpret_cast<uint64_t *>(state + STATE_IN_USE_AT) |= AVX512_STATE;
    write_zmm(state, target_index, target);
    registers[REG_RIP] = reinterpret_cast<greg_t>(next);
}

}  // namespace

extern "C" void model_instructions() {
    ymm_at = offset_of(2);
    opmask_at = offset_of(5);
    zmm_high_at = offset_of(6);
    zmm_16_at = offset_of(7);
    struct sigaction action = {};
    action.sa_sigaction = on_unknown_instruction;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}
