// Every operation that torch has for the CPU, on the device: by the CPU's own kernel, on a worker.
//
// What comes out is learned by running: the first call of an operation on given shapes waits for
// its end, and later ones allocate what the first one gave, enqueue, and return at once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>

#include "generator.h"
#include "views.h"

namespace testdev {
namespace {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

struct Shape {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

// Of one return: an argument, or new tensors (several for a list, none where it is undefined).
struct Output {
  int argument = -1;
  bool list = false;
  std::vector<std::optional<Shape>> made;
};
using Outputs = std::vector<Output>;

std::mutex known_lock;
std::unordered_map<std::string, Outputs> known;  // by operation and shapes

// One call: what the CPU's kernel gets, and what it touches.
struct Call {
  const c10::OperatorHandle* op;
  Stack given, seen;  // as the caller gave them; as a worker sees them
  std::vector<Access> accesses;
  std::string key;
  bool learnable = true;
  bool has_generator = false;  // where it draws from
  bool draws_from_default = false;

  void add(const IValue& value, bool writes);
  IValue tensor(const Tensor& value, bool writes);
  template <typename T>
  void note(T value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
};

IValue Call::tensor(const Tensor& value, bool writes) {
  note(value.defined());
  if (!value.defined()) return value;
  TORCH_CHECK(on_device(value) || value.dim() == 0, op->schema().name(),
              ": a tensor on the CPU with ", value.dim(),
              " dimensions beside tensors on the test device");
  note(on_device(value));
  note(value.scalar_type());
  note(value.unsafeGetTensorImpl()->is_wrapped_number());
  note(value.dim());
  for (int64_t size : value.sizes()) note(size);
  for (int64_t stride : value.strides()) note(stride);
  if (!on_device(value)) return writes ? value : value.clone();
  accesses.push_back(access_of(value, writes));
  if (writes && value.numel() == 0) learnable = false;  // it may be resized
  return seen_by_worker(value);
}

void Call::add(const IValue& value, bool writes) {
  if (value.isTensor()) {
    seen.emplace_back(tensor(value.toTensor(), writes));
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    note(value.toTensorList().size());
    for (const Tensor& one : value.toTensorVector()) list.push_back(tensor(one, writes).toTensor());
    seen.emplace_back(std::move(list));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    note(value.toOptionalTensorList().size());
    for (const std::optional<Tensor>& one : value.toOptionalTensorVector()) {
      note(one.has_value());
      list.push_back(one ? std::optional<Tensor>(tensor(*one, writes).toTensor()) : std::nullopt);
    }
    seen.emplace_back(std::move(list));
  } else if (value.isDevice()) {
    seen.emplace_back(c10::Device(at::kCPU));
  } else if (value.isGenerator()) {
    seen.emplace_back(cpu_generator_of(value.toGenerator()));
    has_generator = true;
  } else {
    seen.push_back(value);
    note(value.tagKind().front());
    if (value.isInt()) note(value.toInt());
    if (value.isBool()) note(value.toBool());
    if (value.isIntList()) {
      note(value.toIntVector().size());
      for (int64_t one : value.toIntVector()) note(one);
    }
    if (value.isBoolList())
      for (bool one : value.toBoolList().vec()) note(one);
  }
}

// Runs the CPU's kernel; an operation that draws without saying from where draws from the device.
void run_on_cpu(const c10::OperatorHandle& op, Stack& stack, bool draws_from_default) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!draws_from_default) {
    op.callBoxed(stack);
    return;
  }
  static std::mutex drawing;
  std::lock_guard<std::mutex> held(drawing);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Generator own = cpu_generator_of(default_generator());
  const auto kept = cpu.getIntrusivePtr()->get_state();
  cpu.getIntrusivePtr()->set_state(*own.getIntrusivePtr()->get_state());
  op.callBoxed(stack);
  own.getIntrusivePtr()->set_state(*cpu.getIntrusivePtr()->get_state());
  cpu.getIntrusivePtr()->set_state(*kept);
}

Tensor made(const Shape& shape) {
  return at::empty_strided(shape.sizes, shape.strides,
                           at::TensorOptions().dtype(shape.dtype).device(at::kPrivateUse1));
}

Shape shape_of(const Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

// The argument that a return is, after the schema: in-place and out= operations.
int argument_of(const c10::FunctionSchema& schema, size_t number) {
  const c10::AliasInfo* alias = schema.returns()[number].alias_info();
  if (alias == nullptr) return -1;
  TORCH_CHECK(alias->isWrite(), schema.name(), " gives a view: the test device lacks it");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
  }
  TORCH_CHECK(false, schema.name(), " gives an argument that is not found");
}

// Learns what an operation that was just run on `call.seen` gave.
Outputs learn(const Call& call, const Stack& results) {
  const auto& schema = call.op->schema();
  Outputs outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    Output output;
    output.argument = argument_of(schema, i);
    if (output.argument < 0) {
      if (results[i].isTensorList()) {
        output.list = true;
        for (const Tensor& one : results[i].toTensorVector()) output.made.push_back(shape_of(one));
      } else {
        const Tensor& one = results[i].toTensor();
        output.made.push_back(one.defined() ? std::optional<Shape>(shape_of(one)) : std::nullopt);
      }
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

// Gives the caller its results, and returns those that are new, in order.
std::vector<Tensor> give(const Call& call, const Outputs& outputs, Stack* stack) {
  std::vector<Tensor> fresh;
  for (const Output& output : outputs) {
    if (output.argument >= 0) {
      stack->push_back(call.given[output.argument]);
      continue;
    }
    c10::List<Tensor> list;
    for (const auto& shape : output.made) {
      Tensor one = shape ? made(*shape) : Tensor();
      if (shape) fresh.push_back(one);
      if (output.list) {
        list.push_back(one);
      } else {
        stack->emplace_back(one);
      }
    }
    if (output.list) stack->emplace_back(std::move(list));
  }
  return fresh;
}

// The new tensors among what a kernel gave.
std::vector<Tensor> fresh_of(const Outputs& outputs, const Stack& results) {
  std::vector<Tensor> fresh;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].argument >= 0) continue;
    if (outputs[i].list) {
      for (const Tensor& one : results[i].toTensorVector()) fresh.push_back(one);
    } else if (results[i].toTensor().defined()) {
      fresh.push_back(results[i].toTensor());
    }
  }
  return fresh;
}

void copy_bits(const Tensor& to, const Tensor& from) {
  TORCH_CHECK(to.sizes() == from.sizes(), "a kernel gave another shape than the first time");
  if (from.is_non_overlapping_and_dense() && to.strides() == from.strides()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    to.copy_(from);
  }
}

// A call whose results are not known: it is run, and waited for.
void first_call(Call& call, Stack* stack, int stream) {
  const c10::OperatorHandle op = *call.op;
  const auto& schema = op.schema();
  Device& device = Device::get();
  const char* name = schema.name().c_str();
  Stack results = call.seen;
  device.run_now(stream, name, call.accesses,
                 [&] { run_on_cpu(op, results, call.draws_from_default); });
  for (size_t i = 0; i < schema.arguments().size(); ++i) {  // empty out= tensors that were resized
    if (!call.given[i].isTensor() || !on_device(call.given[i].toTensor())) continue;
    const Tensor &was = call.given[i].toTensor(), &is = call.seen[i].toTensor();
    if (was.numel() != 0 || is.numel() == 0) continue;
    at::native::resize_(was, is.sizes());
    const Tensor to = seen_by_worker(was);
    device.run_now(stream, name, {access_of(was, true)}, [&] { copy_bits(to, is); });
  }
  for (const IValue& result : results) {
    if (result.isTensor() || result.isTensorList()) continue;
    for (IValue& one : results) stack->push_back(std::move(one));  // a number, a bool
    return;
  }
  const Outputs outputs = learn(call, results);
  const std::vector<Tensor> to = give(call, outputs, stack), from = fresh_of(outputs, results);
  std::vector<Access> accesses;
  for (const Tensor& one : to) accesses.push_back(access_of(one, true));
  device.run_now(stream, name, accesses, [&] {
    for (size_t i = 0; i < to.size(); ++i) copy_bits(seen_by_worker(to[i]), from[i]);
  });
  if (call.learnable) {
    std::lock_guard<std::mutex> held(known_lock);
    known.emplace(call.key, outputs);
  }
  ++device.counters.learned;
}

void later_call(Call& call, const Outputs& outputs, Stack* stack, int stream) {
  std::vector<Tensor> seen;
  for (const Tensor& one : give(call, outputs, stack)) {
    call.accesses.push_back(access_of(one, true));
    seen.push_back(seen_by_worker(one));
  }
  Device::get().submit(stream, call.op->schema().name().c_str(), call.accesses,
                       [op = *call.op, results = call.seen, outputs, seen]() mutable {
                         run_on_cpu(op, results, false);
                         const std::vector<Tensor> from = fresh_of(outputs, results);
                         for (size_t i = 0; i < seen.size(); ++i) copy_bits(seen[i], from[i]);
                       });
}

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Call call;
  call.op = &op;
  const void* identity = &schema;
  call.note(identity);
  call.given.assign(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  for (size_t i = 0; i < count; ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    call.add(call.given[i], alias != nullptr && alias->isWrite());
  }
  const bool draws = call.has_generator || op.hasTag(at::Tag::nondeterministic_seeded);
  call.draws_from_default = draws && !call.has_generator;
  if (draws || op.hasTag(at::Tag::dynamic_output_shape) ||
      op.hasTag(at::Tag::data_dependent_output))
    call.learnable = false;
  torch::jit::drop(*stack, count);
  const int stream = current_stream();
  std::optional<Outputs> outputs;
  if (call.learnable) {
    std::lock_guard<std::mutex> held(known_lock);
    if (auto found = known.find(call.key); found != known.end()) outputs = found->second;
  }
  if (outputs) {
    later_call(call, *outputs, stack, stream);
  } else {
    first_call(call, stack, stream);
  }
}

// torch asks a device of ours for convolutions by names of their own.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  kernel(op, stack);
}

// (grad, input, weight, stride, padding, dilation, transposed, output_padding, groups, mask): the
// CPU's wants the sizes of the bias behind the weight.
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto first = stack->end() - 10;
  const Tensor weight = first[2].toTensor();
  IValue bias_sizes;
  if (first[9].toBoolList()[2]) {
    const bool transposed = first[6].toBool();
    const int64_t channels = transposed ? weight.size(1) * first[8].toInt() : weight.size(0);
    bias_sizes = IValue(c10::List<int64_t>({channels}));
  }
  stack->insert(first + 3, std::move(bias_sizes));
  kernel(op, stack);
}

// What operations.cpp has, and what needs no kernel of the CPU's.
bool by_hand(const std::string& name) {
  static const std::set<std::string> names = {"aten::empty",
                                              "aten::empty_strided",
                                              "aten::as_strided",
                                              "aten::view",
                                              "aten::_reshape_alias",
                                              "aten::resize_",
                                              "aten::set_",
                                              "aten::_local_scalar_dense",
                                              "aten::unfold",
                                              "aten::view_as_real",
                                              "aten::view_as_complex",
                                              "aten::_fused_sdp_choice",
                                              "aten::is_set_to",
                                              "aten::_nested_view_from_buffer",
                                              "aten::from_file"};
  return names.count(name) != 0;
}

}  // namespace

// By name, for each operation: a fallback for all would stand behind torch's decompositions, which
// give other bits than the CPU's kernels.
void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || by_hand(name.name)) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const std::string full =
        name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace testdev
