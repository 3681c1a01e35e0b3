// The ops as XLA custom calls: checks of what the caller cannot see, choice of types, layer arithmetic.
#include <string>

#include "attention.h"
#include "kv_update.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pagedjax {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

// What pages hold; in step with native_cpu/ops.py.
enum Kind : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kInt8 = 3, kF8 = 4 };

template <typename Q, typename KV>
void Attend(const AttentionArgs& args, ffi::ThreadPool& pool) {
  Attention<Q, KV>(args).Run(pool);
}

template <typename Q>
ffi::Error AttendPages(int32_t kind, const AttentionArgs& args, ffi::ThreadPool& pool) {
  switch (kind) {
    case kF32: Attend<Q, F32>(args, pool); break;
    case kBF16: Attend<Q, BF16>(args, pool); break;
    case kF16: Attend<Q, F16>(args, pool); break;
    case kInt8: Attend<Q, Int8>(args, pool); break;
    case kF8: Attend<Q, F8>(args, pool); break;
    default: return ffi::Error::InvalidArgument("paged_attention: unknown kind of pages " + std::to_string(kind));
  }
  return ffi::Error::Success();
}

// A wrong index must not read foreign memory.
ffi::Error CheckRows(const AttentionArgs& a, int64_t N) {
  for (int64_t b = 0; b < a.B; b++) {
    const int64_t queries = int64_t{a.cu_q_lens[b + 1]} - a.cu_q_lens[b], length = a.kv_lens[b];
    if (a.cu_q_lens[b] < 0 || queries < 0 || a.cu_q_lens[b + 1] > a.T)
      return ffi::Error::InvalidArgument("paged_attention: cu_q_lens must rise from 0 to at most T");
    if (length > a.P * a.S)
      return ffi::Error::InvalidArgument("paged_attention: kv_lens must be at most P * S = " +
                                         std::to_string(a.P * a.S) + ", got " + std::to_string(length));
    if (queries > length && length > 0)
      return ffi::Error::InvalidArgument("paged_attention: a row has more queries than tokens");
    for (int64_t p = 0; p * a.S < length; p++)
      if (a.page_table[b * a.P + p] < 0 || a.page_table[b * a.P + p] >= N)
        return ffi::Error::InvalidArgument("paged_attention: page_table must be in [0, " + std::to_string(N) + "), got " +
                                           std::to_string(a.page_table[b * a.P + p]));
  }
  return ffi::Error::Success();
}

ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv, Floats scales, Ints layer,
                          Ints page_table, Ints kv_lens, Ints cu_q_lens, Ints window, Floats sinks,
                          ffi::Result<ffi::AnyBuffer> out, int32_t kind, float scale, float soft_cap,
                          int32_t chunk) {
  const auto kv_dims = kv.dimensions(), q_dims = q.dimensions(), table_dims = page_table.dimensions();
  const int64_t N = kv_dims[1], index = layer.typed_data()[0];
  AttentionArgs a;
  a.T = q_dims[0], a.H = q_dims[1], a.D = q_dims[2];
  a.B = table_dims[0], a.P = table_dims[1];
  a.S = kv_dims[2], a.K = kv_dims[3] / 2, a.Dc = kv_dims[4];
  if (index < 0 || index >= kv_dims[0])
    return ffi::Error::InvalidArgument("paged_attention: layer must be in [0, " + std::to_string(kv_dims[0]) + ")");
  const int64_t layer_slots = N * a.S * 2 * a.K, bytes = ffi::ByteWidth(kv.element_type());
  a.q = q.untyped_data();
  a.out = out->untyped_data();
  a.kv = static_cast<const char*>(kv.untyped_data()) + index * layer_slots * a.Dc * bytes;
  a.scales = scales.element_count() ? scales.typed_data() + index * layer_slots : nullptr;
  a.page_table = page_table.typed_data();
  a.kv_lens = kv_lens.typed_data();
  a.cu_q_lens = cu_q_lens.typed_data();
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.window = window.typed_data()[0];
  a.scale = scale;
  a.soft_cap = soft_cap;
  a.chunk = chunk;
  if (chunk < kBlock || chunk % kBlock)
    return ffi::Error::InvalidArgument("paged_attention: chunk must be a multiple of " + std::to_string(kBlock) +
                                       ", got " + std::to_string(chunk));
  if (ffi::Error error = CheckRows(a, N); error.failure()) return error;
  switch (q.element_type()) {
    case ffi::F32: return AttendPages<F32>(kind, a, pool);
    case ffi::BF16: return AttendPages<BF16>(kind, a, pool);
    case ffi::F16: return AttendPages<F16>(kind, a, pool);
    default: return ffi::Error::InvalidArgument("paged_attention: q must be float32, bfloat16 or float16");
  }
}

template <typename X>
ffi::Error WritePages(int32_t kind, const UpdateArgs& args) {
  switch (kind) {
    case kF32: Update<X, F32>(args); break;
    case kBF16: Update<X, BF16>(args); break;
    case kF16: Update<X, F16>(args); break;
    case kInt8: Update<X, Int8>(args); break;
    default: return ffi::Error::InvalidArgument("kv_update: cannot write this kind of pages");
  }
  return ffi::Error::Success();
}

// The pages and scales come back under the same addresses: the call is made with input_output_aliases.
ffi::Error KvUpdate(ffi::AnyBuffer k, ffi::AnyBuffer v, Ints layer, Ints slots, ffi::AnyBuffer kv, Floats scales,
                    ffi::Result<ffi::AnyBuffer> kv_out, ffi::Result<Floats> scales_out, int32_t kind) {
  if (kv.untyped_data() != kv_out->untyped_data() ||
      (scales.element_count() && scales.untyped_data() != scales_out->untyped_data()))
    return ffi::Error::Internal("kv_update: the pages were not passed in place");
  const auto kv_dims = kv_out->dimensions(), k_dims = k.dimensions();
  const int64_t index = layer.typed_data()[0];
  UpdateArgs a;
  a.T = k_dims[0], a.K = k_dims[1], a.D = k_dims[2];
  a.num_slots = kv_dims[1] * kv_dims[2], a.Dc = kv_dims[4];
  if (index < 0 || index >= kv_dims[0])
    return ffi::Error::InvalidArgument("kv_update: layer must be in [0, " + std::to_string(kv_dims[0]) + ")");
  const int64_t layer_heads = a.num_slots * 2 * a.K, bytes = ffi::ByteWidth(kv.element_type());
  a.k = k.untyped_data();
  a.v = v.untyped_data();
  a.slots = slots.typed_data();
  a.kv = static_cast<char*>(kv_out->untyped_data()) + index * layer_heads * a.Dc * bytes;
  a.scales = scales.element_count() ? scales_out->typed_data() + index * layer_heads : nullptr;
  switch (k.element_type()) {
    case ffi::F32: return WritePages<F32>(kind, a);
    case ffi::BF16: return WritePages<BF16>(kind, a);
    case ffi::F16: return WritePages<F16>(kind, a);
    default: return ffi::Error::InvalidArgument("kv_update: k must be float32, bfloat16 or float16");
  }
}

}  // namespace
}  // namespace pagedjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_paged_attention, pagedjax::PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("kind")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("chunk"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_kv_update, pagedjax::KvUpdate,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("kind"));
