"""llama-server's "sampling params": the defaults for requests that do not say."""

from __future__ import annotations

from llamasup.embedded.option import Option
from llamasup.embedded.rules import at_least_minus_one, at_least_zero, grammar, samplers
from llamasup.embedded.setters import sampled, switch
from llamasup.embedded.values import integer, number, unsigned

# Two lines an option; the formatter would make it twelve.
# fmt: off
SAMPLING: tuple[Option, ...] = (
    Option("--samplers", "SAMPLERS", "", samplers(),
           "samplers that will be used for generation in the order, separated by ';'\n"
           "(default: penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature)"),
    Option("-s --seed", "SEED", "", sampled("seed", unsigned),
           "RNG seed (default: -1, use random seed for -1)"),
    Option("--ignore-eos", "", "", switch("sampling.ignore_eos"),
           "ignore end of stream token and continue generating (implies --logit-bias EOS-inf)"),
    Option("--temp --temperature", "N", "LLAMA_ARG_TEMPERATURE", sampled("temp", at_least_zero, "TEMP"),
           "temperature (default: 0.80)"),
    Option("--top-k", "N", "LLAMA_ARG_TOP_K", sampled("top_k", integer, "TOP_K"),
           "top-k sampling (default: 40, 0 = disabled)"),
    Option("--top-p", "N", "LLAMA_ARG_TOP_P", sampled("top_p", number, "TOP_P"),
           "top-p sampling (default: 0.95, 1.0 = disabled)"),
    Option("--min-p", "N", "LLAMA_ARG_MIN_P", sampled("min_p", number, "MIN_P"),
           "min-p sampling (default: 0.05, 0.0 = disabled)"),
    Option("--top-nsigma --top-n-sigma", "N", "", sampled("top_n_sigma", number),
           "top-n-sigma sampling (default: -1.00, -1.0 = disabled)"),
    Option("--xtc-probability", "N", "", sampled("xtc_probability", number, "XTC_PROBABILITY"),
           "xtc probability (default: 0.00, 0.0 = disabled)"),
    Option("--xtc-threshold", "N", "", sampled("xtc_threshold", number, "XTC_THRESHOLD"),
           "xtc threshold (default: 0.10, 1.0 = disabled)"),
    Option("--typical --typical-p", "N", "", sampled("typ_p", number),
           "locally typical sampling, parameter p (default: 1.00, 1.0 = disabled)"),
    Option("--repeat-last-n", "N", "", sampled("penalty_last_n", at_least_minus_one, "PENALTY_LAST_N"),
           "last n tokens to consider for penalize (default: 64, 0 = disabled)"),
    Option("--repeat-penalty", "N", "LLAMA_ARG_REPEAT_PENALTY",
           sampled("penalty_repeat", number, "PENALTY_REPEAT"),
           "penalize repeat sequence of tokens (default: 1.00, 1.0 = disabled)"),
    Option("--presence-penalty", "N", "LLAMA_ARG_PRESENCE_PENALTY", sampled("penalty_present", number),
           "repeat alpha presence penalty (default: 0.00, 0.0 = disabled)"),
    Option("--frequency-penalty", "N", "LLAMA_ARG_FREQUENCY_PENALTY", sampled("penalty_freq", number),
           "repeat alpha frequency penalty (default: 0.00, 0.0 = disabled)"),
    Option("--dry-multiplier", "N", "", sampled("dry_multiplier", number),
           "set DRY sampling multiplier (default: 0.00, 0.0 = disabled)"),
    Option("--dry-base", "N", "", sampled("dry_base", number),
           "set DRY sampling base value (default: 1.75)"),
    Option("--dry-allowed-length", "N", "", sampled("dry_allowed_length", integer),
           "set allowed length for DRY sampling (default: 2)"),
    Option("--dry-penalty-last-n", "N", "", sampled("dry_penalty_last_n", at_least_minus_one),
           "set DRY penalty for the last n tokens (default: 64, 0 = disable)"),
    Option("--adaptive-target", "N", "", sampled("adaptive_target", number),
           "adaptive-p: select tokens near this probability (valid range 0.0 to 1.0; negative = "
           "disabled) (default: -1.00)\n"
           "[(more info)](https://github.com/ggml-org/llama.cpp/pull/17927)"),
    Option("--adaptive-decay", "N", "", sampled("adaptive_decay", number),
           "adaptive-p: decay rate for target adaptation over time. lower values are more reactive, "
           "higher values are more stable.\n"
           "(valid range 0.0 to 0.99) (default: 0.90)"),
    Option("--dynatemp-range", "N", "", sampled("dynatemp_range", number),
           "dynamic temperature range (default: 0.00, 0.0 = disabled)"),
    Option("--dynatemp-exp", "N", "", sampled("dynatemp_exponent", number),
           "dynamic temperature exponent (default: 1.00)"),
    Option("--mirostat", "N", "", sampled("mirostat", integer, "MIROSTAT"),
           "use Mirostat sampling.\n"
           "Top K, Nucleus and Locally Typical samplers are ignored if used. (default: 0, 0 = "
           "disabled, 1 = Mirostat, 2 = Mirostat 2.0)"),
    Option("--mirostat-lr", "N", "", sampled("mirostat_eta", number, "MIROSTAT_ETA"),
           "Mirostat learning rate, parameter eta (default: 0.10)"),
    Option("--mirostat-ent", "N", "", sampled("mirostat_tau", number, "MIROSTAT_TAU"),
           "Mirostat target entropy, parameter tau (default: 5.00)"),
    Option("--grammar", "GRAMMAR", "", grammar(file=False),
           "BNF-like grammar to constrain generations (see samples in grammars/ dir)"),
    Option("--grammar-file", "FNAME", "", grammar(file=True),
           "file to read grammar from"),
    Option("-bs --backend-sampling", "", "LLAMA_ARG_BACKEND_SAMPLING", switch("sampling.backend_sampling"),
           "enable backend sampling (experimental) (default: disabled)"),
)
# fmt: on
