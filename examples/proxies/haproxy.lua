-- Calls tidegate for the client of a request. A denial is answered with the response of tidegate. Otherwise, sets
-- txn.tidegate to "allowed" or "undecided" (tidegate or its store is down), and variables for the header fields.

local CHECK = "http://127.0.0.1:8002/v1/check?policy=api&address="
local FIELDS = { limit = "x-ratelimit-limit", remaining = "x-ratelimit-remaining", reset = "x-ratelimit-reset" }

core.register_action("tidegate", { "http-req" }, function(txn)
    local answer = core.httpclient():get({ url = CHECK .. txn.sf:src() })
    if answer.status == 200 then
        txn:set_var("txn.tidegate", "allowed")
        for variable, name in pairs(FIELDS) do
            txn:set_var("txn." .. variable, (answer.headers[name] or {})[0])
        end
    elseif answer.status == 0 or answer.status >= 500 then
        txn:set_var("txn.tidegate", "undecided")
    else -- denied, or a configuration error such as an unknown policy, which the response explains
        txn:done(txn:reply({ status = answer.status, headers = answer.headers, body = answer.body }))
    end
end)
