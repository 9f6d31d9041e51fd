// Torch's tensors as the structs of args.h.
//
// The ops can be called from Python with anything, so whatever a kernel relies on is checked here:
// device, dtype, rank, every size, contiguity, memory that exists, and outputs that share no memory
// with another argument. A refusal names the argument, what is needed and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "args.h"

namespace sparge {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

constexpr int64_t kAny = -1;                       // a size that this argument decides
constexpr int64_t kMaxLength = int64_t(1) << 36;   // so that block indices fit int32
constexpr int64_t kMaxNumbers = int64_t(1) << 48;  // of one tensor: products of sizes fit int64
constexpr int64_t kMaxOffset = int64_t(1) << 40;   // so that positions fit int64

inline int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  text << "sparge_cpu: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline std::string text_of(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i) text << ", ";
    if (sizes[i] == kAny)
      text << '*';
    else
      text << sizes[i];
  }
  text << ']';
  return text.str();
}
inline std::string text_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return std::string(toString(x.scalar_type())) + " " + text_of(Sizes(sizes.begin(), sizes.end()));
}

template <class T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
constexpr ScalarType kScalarType<bool> = ScalarType::Bool;
template <>
constexpr ScalarType kScalarType<int8_t> = ScalarType::Char;
template <>
constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;
template <>
constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;
template <>
constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
constexpr ScalarType kScalarType<double> = ScalarType::Double;

inline int64_t in_range(const char* name, int64_t x, int64_t low, int64_t high) {
  if (x < low || x > high) refuse(name, " must be in ", low, " … ", high, ", got ", x);
  return x;
}

inline void check_floats(const char* name, const Rows& r) {
  if (r.dtype == Dtype::i8) refuse(name, " must be float32, bfloat16 or float16, got int8");
}

inline void check_between(const char* name, const double* x, int64_t n, double low, double high) {
  for (int64_t i = 0; i < n; ++i)
    if (!(x[i] >= low && x[i] <= high))
      refuse(name, " must be in ", low, " … ", high, ", got ", x[i]);
}

// The arguments of one call of an op.
class Arguments {
 public:
  Arguments() { ranges.reserve(32); }

  // A tensor [B, H, L, D] of any strides.
  Rows rows(const char* name, const Tensor& x, const Sizes& sizes) {
    check(name, x, sizes);
    check_row_sizes(name, x.size(2), x.size(3));
    Rows r;
    r.dtype = dtype(name, x);
    const int64_t bytes = int64_t(x.element_size());
    auto stride = [&](int64_t d) { return x.size(d) == 1 ? 0 : x.stride(d) * bytes; };
    r.data = static_cast<const char*>(x.data_ptr());
    r.stride_b = stride(0), r.stride_h = stride(1), r.stride_l = stride(2);
    r.stride_d = x.size(3) == 1 ? bytes : x.stride(3) * bytes;
    add_range(name, x, false);
    return r;
  }
  Rows float_rows(const char* name, const Tensor& x, const Sizes& sizes) {
    const Rows r = rows(name, x, sizes);
    check_floats(name, r);
    return r;
  }

  // Data of a contiguous tensor of exactly these sizes.
  template <class T>
  const T* read(const char* name, const Tensor& x, const Sizes& sizes) {
    return static_cast<const T*>(contiguous(name, x, kScalarType<T>, sizes, false));
  }
  template <class T>
  const T* read(const char* name, const MaybeTensor& x, const Sizes& sizes) {
    return x ? read<T>(name, *x, sizes) : nullptr;
  }
  template <class T>
  T* write(const char* name, const Tensor& x, const Sizes& sizes) {
    return static_cast<T*>(contiguous(name, x, kScalarType<T>, sizes, true));
  }
  template <class T>
  T* write(const char* name, const MaybeTensor& x, const Sizes& sizes) {
    return x ? write<T>(name, *x, sizes) : nullptr;
  }
  // Data that one stage writes and later ones read.
  template <class T>
  T* place(const char* name, const MaybeTensor& x, const Sizes& sizes, bool written) {
    return x ? static_cast<T*>(contiguous(name, *x, kScalarType<T>, sizes, written)) : nullptr;
  }
  // The same of rows in any dtype of numbers or codes.
  char* place_rows(const char* name, const Tensor& x, const Sizes& sizes, Dtype* type,
                   bool written) {
    *type = dtype(name, x);
    return static_cast<char*>(contiguous(name, x, x.scalar_type(), sizes, written));
  }
  // An output in one of the caller's float dtypes.
  char* write_floats(const char* name, const Tensor& x, const Sizes& sizes, Dtype* type) {
    char* data = place_rows(name, x, sizes, type, true);
    if (*type == Dtype::i8) refuse(name, " must be float32, bfloat16 or float16, got int8");
    return data;
  }

  static Shape shape(const Tensor& query, const Tensor& key, const Tensor& value) {
    check("query", query, {kAny, kAny, kAny, kAny});
    check("key", key, {query.size(0), kAny, kAny, query.size(3)});
    check("value", value, {query.size(0), key.size(1), key.size(2), kAny});
    if (query.size(1) % key.size(1))
      refuse("query must have a multiple of the ", key.size(1), " heads of key, got ",
             query.size(1));
    return {query.size(0), query.size(1), key.size(1),  query.size(2),
            key.size(2),   query.size(3), value.size(3)};
  }
  static TokenMask diagonal(bool is_causal, int64_t offset) {
    TokenMask t;
    t.is_causal = is_causal;
    t.offset = in_range("offset", offset, -kMaxOffset, kMaxOffset);
    return t;
  }
  void take_mask(TokenMask* t, const Tensor& mask, const Shape& s) {
    if (mask.dim() != 4) refuse("mask must have 4 dimensions, got ", text_of(mask));
    check("mask", mask,
          {broadcast_size(mask, 0, s.B), broadcast_size(mask, 1, s.Hq),
           broadcast_size(mask, 2, s.Lq), broadcast_size(mask, 3, s.Lk)});
    t->type = mask_type(mask);
    const int64_t bytes = int64_t(mask.element_size());
    auto stride = [&](int64_t d) { return mask.size(d) == 1 ? 0 : mask.stride(d) * bytes; };
    t->data = static_cast<const char*>(mask.data_ptr());
    t->stride_b = stride(0), t->stride_h = stride(1);
    t->stride_q = stride(2), t->stride_k = stride(3);
    add_range("mask", mask, false);
  }

  static double finite(const char* name, double x) {
    if (!std::isfinite(x)) refuse(name, " must be finite, got ", x);
    return x;
  }

 private:
  struct Range {
    const char* name;
    const char *start, *stop;
    bool written;
  };
  std::vector<Range> ranges;

  // A size that may also be 1.
  static int64_t broadcast_size(const Tensor& x, int64_t d, int64_t size) {
    return x.dim() > d && x.size(d) == 1 ? 1 : size;
  }

  static void check(const char* name, const Tensor& x, const Sizes& sizes) {
    if (!x.is_cpu()) refuse(name, " must be a tensor on the CPU");
    bool fits = x.dim() == int64_t(sizes.size());
    for (size_t i = 0; fits && i < sizes.size(); ++i) {
      const int64_t size = x.size(int64_t(i));
      fits = size >= 1 && (sizes[i] == kAny || size == sizes[i]);
    }
    if (!fits)
      refuse(name, " must have shape ", text_of(sizes), " and no empty dimension, got ",
             text_of(x));
    int64_t numbers = 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      numbers *= x.size(int64_t(i)) < kMaxNumbers ? x.size(int64_t(i)) : kMaxNumbers;
      if (numbers > kMaxNumbers) refuse(name, " is too large, ", text_of(x));
    }
  }
  static void check_row_sizes(const char* name, int64_t L, int64_t D) {
    if (L > kMaxLength) refuse(name, " has more than ", kMaxLength, " rows");
    if (D > kMaxDim) refuse(name, " must have a head dim of at most ", kMaxDim, ", got ", D);
  }
  static Dtype dtype(const char* name, const Tensor& x) {
    switch (x.scalar_type()) {
      case ScalarType::Float:
        return Dtype::f32;
      case ScalarType::BFloat16:
        return Dtype::bf16;
      case ScalarType::Half:
        return Dtype::f16;
      case ScalarType::Char:
        return Dtype::i8;
      default:
        refuse(name, " must be float32, bfloat16, float16 or int8, got ",
               toString(x.scalar_type()));
    }
  }
  static MaskType mask_type(const Tensor& mask) {
    switch (mask.scalar_type()) {
      case ScalarType::Bool:
        return MaskType::boolean;
      case ScalarType::Float:
        return MaskType::f32;
      case ScalarType::BFloat16:
        return MaskType::bf16;
      case ScalarType::Half:
        return MaskType::f16;
      default:
        refuse("mask must be bool, float32, bfloat16 or float16, got ",
               toString(mask.scalar_type()));
    }
  }
  void* contiguous(const char* name, const Tensor& x, ScalarType type, const Sizes& sizes,
                   bool written) {
    check(name, x, sizes);
    if (x.scalar_type() != type)
      refuse(name, " must be ", toString(type), ", got ", toString(x.scalar_type()));
    if (!x.is_contiguous()) refuse(name, " must be contiguous");
    add_range(name, x, written);
    return x.data_ptr();
  }

  // Notes the memory of a checked tensor. Torch lets a storage shrink under its tensors.
  void add_range(const char* name, const Tensor& x, bool written) {
    int64_t last = 0, storage = 0;
    for (int64_t d = 0; d < x.dim(); ++d)
      if (x.size(d) > 1) last += (x.size(d) - 1) * x.stride(d);
    const int64_t bytes = int64_t(x.element_size());
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &storage));
    if ((x.storage_offset() + last + 1) * bytes > storage)
      refuse(name, " is larger than its storage of ", storage, " bytes");
    const char* start = static_cast<const char*>(x.data_ptr());
    const Range range{name, start, start + (last + 1) * bytes, written};
    for (const Range& other : ranges)
      if ((written || other.written) && start < other.stop && other.start < range.stop)
        refuse(written ? name : other.name, " is an output and must share no memory with ",
               written ? other.name : name);
    ranges.push_back(range);
  }
};

}  // namespace sparge
