-- Envoy runs this for each request. It hashes the start of a conversation, so that all its turns reach the replica
-- that has its prefix in the cache. A client may name the conversation itself with the header x-session-id.

-- The key of a request without messages: the first bytes of its prompt.
local PROMPT_BYTES = 1024
-- More than this is not read.
local LONGEST = 65536

local QUOTE, BACKSLASH, OPEN, CLOSE = 34, 92, 123, 125

local function end_of_string(body, at)
  while true do
    at = body:find('["\\]', at + 1)
    if not at then
      return #body
    elseif body:byte(at) == QUOTE then
      return at
    end
    at = at + 1
  end
end

-- Where the first message of a user ends; where there is none, the end of the list.
local function end_of_first_question(body, at)
  local depth, message = 0, at
  at = body:find("[", at, true) or #body
  while true do
    at = body:find('["{}%]]', at + 1)
    local char = at and body:byte(at)
    if not at then
      return #body
    elseif char == QUOTE then
      at = end_of_string(body, at)
    elseif char == OPEN then
      message = depth == 0 and at or message
      depth = depth + 1
    elseif char == CLOSE then
      depth = depth - 1
      if depth == 0 and body:sub(message, at):find('"role"%s*:%s*"user"') then
        return at
      end
    elseif depth == 0 then
      return at
    end
  end
end

-- The key of a chat: its messages up to the first of a user, the system prompt among them.
local function key_of(body)
  local messages = body:find('"messages"%s*:%s*%[') or body:find('"input"%s*:%s*%[%s*{')
  if messages then
    return body:sub(messages, end_of_first_question(body, messages))
  end
  local prompt = body:find('"prompt"%s*:') or body:find('"input"%s*:') or body:find('"input_ids"%s*:')
  return prompt and body:sub(prompt, prompt + PROMPT_BYTES)
end

-- FNV-1a, 32 bits. The product is taken in two halves, because a double holds 53 bits.
local function hash(text)
  local value = 2166136261
  for i = 1, #text do
    value = bit.bxor(value, text:byte(i))
    local low, high = bit.band(value, 0xffff), bit.rshift(value, 16)
    value = bit.tobit(low * 16777619 + bit.lshift(bit.band(high * 16777619, 0xffff), 16))
  end
  return bit.tohex(value)
end

function envoy_on_request(handle)
  local key = handle:headers():get("x-session-id")
  if not key and handle:headers():get(":method") == "POST" then
    local body = handle:body()
    if body and body:length() > 0 then
      key = key_of(body:getBytes(0, math.min(body:length(), LONGEST)))
    end
  end
  -- The headers of before body() are void after it.
  handle:headers():remove("x-dlinfer-prefix")
  if key then
    handle:headers():add("x-dlinfer-prefix", hash(key))
  end
end
