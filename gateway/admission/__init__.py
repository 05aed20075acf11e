"""May this request start now? The answer is given in this order, each part by one module:

    auth            who is it: an API key's name, or an address
    quotas          its key's and the gateway's limits of requests, and its key's of tokens
    body_budget     memory for its body and its answer, and a thread to read it
    readiness       whether the gateway takes any: not while it shuts down, or its log takes no writes
    shared/log      `log_budget`: room in the log for its record, and among stored responses for its answer
    grammar_turns   whether its grammar, if it has one, may be compiled now
    fair_starts     whose output starts next, and how many the verifiers have room for

The servers ask the first three as the bytes come in (`auth.Admission`; servers/http/admission, servers/grpc_admission),
servers/live_service the next two when the request begins, decoding/generation the last two for each output. A
verifier's own memory is in verifier_service/admission. When a refused caller may try again is in shared/errors, unless
quotas or log_budget can compute it.
"""
